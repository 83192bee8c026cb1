"""`train`, `inspect` and `convert` understand every row alike: what it asks, what is right, what its images show."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.made_sets import corners, encoded, jsonl, loaded, parquet, picture, skipped_in

from vgr_trl.cli.data import convert_run, inspect_run, make_parser
from vgr_trl.rewards import resolve_solution

RED, BLUE = (200, 30, 40), (10, 20, 250)
MC = {"problem": "Which?", "choices": ["red", "blue"], "image": "red.png"}
OPEN = {"problem": "How many?", "image": "red.png"}
TURN = {"role": "user", "content": "How many?"}
PNG = base64.b64encode(picture(RED)["bytes"]).decode()
JPEG = base64.encodebytes(encoded(Image.new("RGB", (8, 6), BLUE), "JPEG", quality=100)).decode()  # in lines of 76

# What a usable row says: its question, the answers that are right, and the corner pixel of each of its images. Of the
# colours that a file changes, JPEG's differ by up to 3.
USABLE: dict[str, tuple[dict[str, Any], str, str, list[tuple[int, int, int]]]] = {
    "index": ({**MC, "solution": 1}, "Which?", "blue", [RED]),
    "digits among options of digits": ({**MC, "choices": ["2", "1"], "solution": "1"}, "Which?", "1", [RED]),
    "choices as a text": ({**MC, "choices": "['red', 'blue']", "solution": "B"}, "Which?", "blue", [RED]),
    "leading zeros": ({**OPEN, "solution": "007"}, "How many?", "007", [RED]),
    "prompt as a conversation": ({"prompt": [{"role": "user", "content": "How many?"}], "solution": "3", "image":
     "red.png"}, "How many?", "3", [RED]),
    "marks": ({"problem": "<image> or <image>?", "solution": "3", "images": ["red.png", "blue.png"]},
     "<image> or <image>?", "3", [RED, BLUE]),
    "a list in image": ({"problem": "q", "solution": "x", "image": ["red.png", "blue.png"]}, "q", "x", [RED,
     BLUE]),
    "images before image": ({**OPEN, "images": ["blue.png"], "solution": "x"}, "How many?", "x", [BLUE]),
    "image null": ({**OPEN, "image": None, "solution": "x"}, "How many?", "x", []),
    "turned": ({**OPEN, "image": "turned.jpg", "solution": "x"}, "How many?", "x", [BLUE]),
    "A-OKVQA": ({"question": "Which?", "choices": ["red", "blue"], "correct_choice_idx": 1, "image": "red.png"},
     "Which?", "blue", [RED]),
    "ArxivQA": ({"question": "Which?", "options": ["A) red", "B) blue"], "label": "B", "image": "red.png"},
     "Which?", "blue", [RED]),
    "MMMU-Pro": ({"question": "Which is <image 2>?", "options": "['red', '<image 3>']", "answer": "B", "image_1":
     None, "image_2": "red.png", "image_3": "blue.png"}, "Which is <image 1>?", "<image 2>", [RED, BLUE]),
    "MMBench": ({"question": "Which?", "A": "red", "B": "blue", "C": None, "answer": "B", "image": "red.png", "image2":
     "blue.png"}, "Which?", "blue", [RED, BLUE]),
    "options by letter": ({"question": "Which?", "options": {"B": "blue", "A": "red"}, "answer": "B", "image":
     "red.png"}, "Which?", "blue", [RED]),
    "ARC": ({"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answer": "B"},
     "Which?", "blue", []),
    "options with labels": ({"question": "Which?", "options": [{"label": "a", "text": "red"}, {"label": "b", "text":
     "blue"}], "answer": "b"}, "Which?", "blue", []),
    "options as lines": ({"question": "Which?", "options": "A. red\nB. blue\n", "answer": "B"}, "Which?", "blue", []),
    "a column for each option": ({"question": "Which?", "option_a": "red", "option_b": "blue", "option_c": "",
     "answer": "a"}, "Which?", "red", []),
    "base64, as in MMBench's TSV": ({**OPEN, "image": PNG, "solution": "x"}, "How many?", "x", [RED]),
    "base64 that begins like an absolute path": ({**OPEN, "image": JPEG, "solution": "x"}, "How many?", "x", [BLUE]),
    "data address": ({**OPEN, "image": f"data:image/png;base64,{PNG}", "solution": "x"}, "How many?", "x", [RED]),
    "VQA": ({"question": "What?", "answers": [{"answer": "cup"}, {"answer": "mug"}]}, "What?", "cup/mug", []),
    "DocVQA": ({"question": "What?", "answers": ["12", "12.0"], "image": "red.png"}, "What?", "12/12.0", [RED]),
    "true and false": ({"question": "Is it?", "solution": True, "image": "red.png"}, "Is it?", "yes", [RED]),
    "LLaVA": ({"conversations": [{"from": "human", "value": "<image>\nHow?"}, {"from": "gpt", "value": "3"}],
     "image": "red.png"}, "<image>\nHow?", "3", [RED]),
    "ms-swift": ({"messages": [{"role": "user", "content": "<image>How?"}, {"role": "assistant", "content":
     "I see 3."}], "images": ["red.png"], "solution": "3"}, "<image>How?", "3", [RED]),
    "an answer in tags": ({"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content":
     "<think>hm</think><answer>3</answer>"}]}, "How?", "3", []),
}  # fmt: skip

# Why another row is left out: how the reason begins, wherever it is given.
UNUSABLE: dict[str, tuple[Any, str]] = {
    "index or text": ({**MC, "choices": ["1", "2"], "solution": 1},
     "its solution is the number 1, which"),
    "none of the choices": ({**MC, "solution": "green"}, "solution is 'green', which is none of the choices"),
    "null solution": ({**OPEN, "solution": None}, "solution is None"),
    "the right choice twice": ({**MC, "choices": ["red", "red"], "solution": 0}, ""),
    "choices as prose": ({**MC, "choices": "red or blue", "solution": "A"}, "its options is 'red or blue'"),
    "number as problem": ({**OPEN, "problem": 7, "solution": "x"},
     "its prompt is a int: give a text or a conversation (a list of messages)"),
    "placeholder without image": ({"problem": "<image>?", "solution": "x"},
     "its prompt has 1 <image> placeholders, but there are 0"),
    "MMMU-Pro's placeholder without image": ({"question": "Is <image 2>?", "answer": "x", "image_1": "red.png"},
     "it refers to <image 2>, but there is no"),
    "messages of others": ({"messages": [{"role": "tool", "content": "?"}, {"role": "assistant", "content":
     "3"}]}, "one of its messages is {{'role': 'tool'"),
    "address": ({**OPEN, "image": "https://example.org/a.png", "solution": "x"}, "image is a URL (https"),
    "data address without base64": ({**OPEN, "image": "data:image/svg+xml,%3Csvg/%3E", "solution": "x"},
     "image is a URL (data:"),
    "torn base64": ({**OPEN, "image": f"data:image/png;base64,{PNG[:-1]}", "solution": "x"},
     "image is unreadable: the text is not base64"),
    "base64 of nothing known": ({**OPEN, "image": "data:image/png;base64,AAAA", "solution": "x"},
     "image is unreadable: not in a known image format"),
    "options with numbers for labels": ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]},
     "answer": "1"}, "its options carry the labels 1, 2: give letters"),
    "outside": ({**OPEN, "image": "/etc/passwd", "solution": "x"}, "file /etc/passwd is outside {folder}"),
    "missing": ({**OPEN, "image": "no.png", "solution": "x"}, "image file {folder}/no.png does not exist"),
    "truncated": ({**OPEN, "image": "half.jpg", "solution": "x"}, "image is truncated or damaged"),
    "bomb": ({**OPEN, "image": "bomb.png", "solution": "x"}, "image is unreadable: Image size (3000 pixels) exceeds"),
    "torn line": ('{"problem": "q", "solut', "the line is not JSON"),
    "a list": ("[1, 2]", "the row is a list, not an object"),
    "no question": ({**OPEN, "problem": " ", "solution": "x"}, ""),
    "an answer at the end": ({"prompt": [TURN, {"role": "assistant", "content": "3"}], "solution": "3"}, "its prompt"),
    "no content": ({"prompt": [{"role": "user", "content": 3}], "solution": "3"}, "a message of its prompt lacks"),
    "one option": ({**MC, "choices": ["red"], "solution": "A"}, "it has 1 options"),
    "eleven options": ({**MC, "choices": list("ABCDEFGHIJK"), "solution": "A"}, "it has 11 options"),
    "control characters": ({**MC, "choices": r"['\alpha', '\beta']", "solution": "A"}, ""),
    "letters from B on": ({**MC, "choices": ["B) red", "C) blue"], "solution": "B"}, "its options carry the letters"),
    "a mark beside a video": ({"problem": "<image>", "video": "a.mp4", "solution": "x"}, ""),
}  # fmt: skip
Read = tuple[dict[int, Any], dict[int, str]]
"""The rows that a command can use, and why it leaves the others out, by place."""


def train(file: Path, streaming: bool = False) -> Read:
    return _placed(*loaded(data_files=str(file), dataset_streaming=streaming))


def stream(file: Path) -> Read:
    return train(file, streaming=True)


def inspect(file: Path) -> Read:
    listed = file.with_name("inspected.jsonl")
    flags = ["inspect", str(file), "--tiny", "--samples", "0", "--skipped", str(listed)]
    found = inspect_run(make_parser().parse_args(flags))
    left_out = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    return _placed([None] * found.usable, {row["row"]: row["reason"] for row in left_out})


def convert(file: Path) -> Read:
    """Convert, and read what was written as `train` does."""
    out = file.with_name("converted")
    flags = ["convert", "jsonl", "--data_files", str(file), "--output_dir", str(out), "--workers", "0"]
    convert_run(make_parser().parse_args(flags))
    rows, left_out = train(out / "train-00000.parquet")
    assert not left_out
    return _placed(list(rows.values()), {row["row"]: row["reason"] for row in skipped_in(out)})


COMMANDS = {"train": train, "stream": stream, "inspect": inspect, "convert": convert}


def _placed(rows: list[Any], reasons: dict[int, str]) -> Read:
    places = [place for place in range(len(rows) + len(reasons)) if place not in reasons]
    return dict(zip(places, rows, strict=True)), reasons


def content(row: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """The question with its options, the right answers, and the corner pixels of the images."""
    parts = row["prompt"][-1]["content"]
    if not isinstance(parts, str):
        parts = "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)
    stated = row.get("solution") if row.get("solution") is not None else row["label_idx"]
    right = resolve_solution(stated, row.get("choices"))
    return parts, "/".join(each.text for each in (right, *right.others)), corners(row)


ROWS = {name: said[0] for name, said in {**USABLE, **UNUSABLE}.items()}
NAMES = list(ROWS)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_images(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        yield jsonl(folder / "rows.jsonl", list(ROWS.values()))


@pytest.fixture(scope="module")
def found(file):
    return {name: read(file) for name, read in COMMANDS.items()}


def write_images(folder: Path) -> None:
    for name, colour in {"red.png": RED, "blue.png": BLUE}.items():
        Image.new("RGB", (8, 6), colour).save(folder / name)
    Image.new("RGB", (60, 50)).save(folder / "bomb.png")
    (folder / "half.jpg").write_bytes(encoded(Image.effect_noise((30, 30), 80), "JPEG")[:600])
    turned = Image.new("RGB", (32, 16), RED)
    turned.paste(BLUE, (0, 8, 32, 16))  # the lower half; orientation 6 has the first column of what is shown there
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif, quality=100, subsampling=0)


def test_usable_rows_say_the_same(found):
    assert {len(rows) for rows, _ in found.values()} == {len(USABLE)}
    for name, (_, question, answer, expected) in USABLE.items():
        read = [content(found[command][0][NAMES.index(name)]) for command in ("train", "stream", "convert")]
        assert len({text for text, _, _ in read}) == 1, name
        for text, right, seen in read:
            assert (text.split("\nA. ")[0], right, len(seen)) == (question, answer, len(expected)), name
            for colour, right in zip(seen, expected, strict=True):
                assert max(abs(a - b) for a, b in zip(colour, right, strict=True)) <= 3, name


def test_other_rows_are_left_out_for_the_same_reason(file, found):
    for name, (_, beginning) in UNUSABLE.items():
        reasons = {left_out.get(NAMES.index(name)) for _, left_out in found.values()}
        assert len(reasons) == 1, (name, reasons)
        assert (reasons.pop() or "").startswith(beginning.format(folder=file.parent)), name


@pytest.mark.parametrize("name", ["leading zeros", "choices as a text", "LLaVA"])
def test_a_row_means_the_same_without_its_neighbours(file, found, name):
    alone = jsonl(file.with_name("alone.jsonl"), [ROWS[name]])
    assert content(train(alone)[0][0]) == content(found["train"][0][NAMES.index(name)])


LATIN = b'{"problem": "q", "solution": "x"}\n{"problem": "sch\xf6n", "solution": "x"}'


@pytest.mark.parametrize("command", COMMANDS)
def test_files_with_a_row_that_is_left_out(tmp_path, command):
    right = {"problem": "q", "solution": "x", "image": picture(RED)}
    rows = [right, {"problem": "q", "solution": None}, *[right] * 8]
    _, reasons = COMMANDS[command](parquet(tmp_path / "a" / "rows.parquet", rows))
    assert reasons == {1: "solution is None: give the right answer, a text or a number"}
    (tmp_path / "rows.jsonl").write_bytes(LATIN)
    assert COMMANDS[command](tmp_path / "rows.jsonl")[1] == {1: "the line is not UTF-8"}
