"""`train`, `inspect` and `convert` understand every row alike: what it asks, what is right, what its images show."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from support.made_sets import encoded, picture, skipped_in

from vgr_trl.cli import data as data_convert
from vgr_trl.cli import data as data_inspect
from vgr_trl.cli.arguments import DataArguments, load_rows
from vgr_trl.cli.data import inspect_run as inspect_rows
from vgr_trl.data.columns import images_of
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.rewards import resolve_solution
from vgr_trl.utils import VGRError

RED, BLUE, GREY = (200, 30, 40), (10, 20, 250), (128, 128, 128)
MC = {"problem": "Which?", "choices": ["red", "blue"], "image": "red.png"}
OPEN = {"problem": "How many?", "image": "red.png"}

# What a usable row says: its question, its right answer, and the corner pixel of each of its images. Of the colours
# that a file changes, JPEG's differ by up to 3.
USABLE: dict[str, tuple[dict[str, Any], str, str, list[tuple[int, int, int]]]] = {
    "letter": ({**MC, "solution": "B"}, "Which?", "blue", [RED]),
    "text of an option": ({**MC, "solution": "blue"}, "Which?", "blue", [RED]),
    "index": ({**MC, "solution": 1}, "Which?", "blue", [RED]),
    "label": ({**MC, "label_idx": 1}, "Which?", "blue", [RED]),
    "digits among options of digits": (
        {**MC, "choices": ["2", "1"], "solution": "1"},
        "Which?",
        "1",
        [RED],
    ),
    "choices as a text": ({**MC, "choices": "['red', 'blue']", "solution": "B"}, "Which?", "blue", [RED]),
    "choices with letters": ({**MC, "choices": ["A) red", "B) blue"], "solution": "B"}, "Which?", "blue", [RED]),
    "numbers as choices": ({**MC, "choices": [7, 8.5], "solution": "B"}, "Which?", "8.5", [RED]),
    "options": ({"question": "Which?", "options": ["x", "y"], "answer": "A", "image": "red.png"}, "Which?", "x", [RED]),
    "no choices": ({**OPEN, "choices": None, "solution": "three"}, "How many?", "three", [RED]),
    "digits": ({**OPEN, "solution": "1"}, "How many?", "1", [RED]),
    "integer": ({**OPEN, "solution": 3}, "How many?", "3", [RED]),
    "leading zeros": ({**OPEN, "solution": "007"}, "How many?", "007", [RED]),
    "a word that is null elsewhere": ({**OPEN, "solution": "null"}, "How many?", "null", [RED]),
    "prompt as a text": ({"prompt": "How many?", "answer": "3", "images": ["red.png"]}, "How many?", "3", [RED]),
    "prompt as a conversation": (
        {"prompt": [{"role": "user", "content": "How many?"}], "solution": "3", "image": "red.png"},
        "How many?",
        "3",
        [RED],
    ),
    "empty prompt": ({**OPEN, "prompt": "", "solution": "3"}, "How many?", "3", [RED]),
    "mark": ({**OPEN, "problem": "<image>\nHow?", "solution": "3"}, "<image>\nHow?", "3", [RED]),
    "marks": (
        {"problem": "<image> or <image>?", "solution": "3", "images": ["red.png", "blue.png"]},
        "<image> or <image>?",
        "3",
        [RED, BLUE],
    ),
    "other scripts": ({**OPEN, "problem": "图中有几个？🙂", "solution": "三"}, "图中有几个？🙂", "三", [RED]),
    "id a list": ({**OPEN, "id": [7], "solution": "x"}, "How many?", "x", [RED]),
    "source a number": ({**OPEN, "source": 7, "solution": "x"}, "How many?", "x", [RED]),
    "other columns": ({**OPEN, "meta": {"a": [1, "b"]}, "solution": "x"}, "How many?", "x", [RED]),
    "several images": ({"problem": "q", "solution": "x", "images": ["red.png", "blue.png"]}, "q", "x", [RED, BLUE]),
    "a list in image": ({"problem": "q", "solution": "x", "image": ["red.png", "blue.png"]}, "q", "x", [RED, BLUE]),
    "a path in images": ({"problem": "q", "solution": "x", "images": "blue.png"}, "q", "x", [BLUE]),
    "images before image": ({**OPEN, "images": ["blue.png"], "solution": "x"}, "How many?", "x", [BLUE]),
    "image without images": ({**OPEN, "images": None, "solution": "x"}, "How many?", "x", [RED]),
    "path in an object": ({**OPEN, "image": {"bytes": None, "path": "blue.png"}, "solution": "x"}, "How many?", "x",
                          [BLUE]),
    "image null": ({**OPEN, "image": None, "solution": "x"}, "How many?", "x", []),
    "no image": ({"problem": "q", "solution": "x"}, "q", "x", []),
    "sixteen bits": ({**OPEN, "image": "deep.png", "solution": "x"}, "How many?", "x", [GREY]),
    "turned": ({**OPEN, "image": "turned.jpg", "solution": "x"}, "How many?", "x", [BLUE]),
    "palette": ({**OPEN, "image": "palette.png", "solution": "x"}, "How many?", "x", [BLUE]),
    "grey": ({**OPEN, "image": "grey.png", "solution": "x"}, "How many?", "x", [GREY]),
    "CMYK": ({**OPEN, "image": "cmyk.jpg", "solution": "x"}, "How many?", "x", [(0, 255, 255)]),
    "transparent": ({**OPEN, "image": "clear.png", "solution": "x"}, "How many?", "x", [(255, 255, 255)]),
    "A-OKVQA": (
        {"question": "Which?", "choices": ["red", "blue"], "correct_choice_idx": 1, "image": "red.png"},
        "Which?", "blue", [RED],
    ),
    "ArxivQA": (
        {"question": "Which?", "options": ["A) red", "B) blue"], "label": "B", "image": "red.png"},
        "Which?", "blue", [RED],
    ),
    "ArxivQA of VisRAG": (
        {"query": "Which?", "options": ["A) red", "B) blue"], "answer": "B", "image": "red.png"}, "Which?", "blue",
        [RED],
    ),
    "MMMU-Pro": (
        {"question": "Which is <image 2>?", "options": "['red', '<image 3>']", "answer": "B", "image_1": None,
         "image_2": "red.png", "image_3": "blue.png"},
        "Which is <image 1>?", "<image 2>", [RED, BLUE],
    ),
    "MMMU-Pro vision": (
        {"subject": "Art", "options": "['red', 'blue']", "answer": "B", "image": "blue.png"},
        "Answer the multiple-choice question in the image with the letter of the right option.", "B", [BLUE],
    ),
    "LLaVA": (
        {"conversations": [{"from": "human", "value": "<image>\nHow?"}, {"from": "gpt", "value": "3"}],
         "image": "red.png"},
        "<image>\nHow?", "3", [RED],
    ),
    "LLaVA with choices": (
        {"conversations": [{"from": "human", "value": "Which?<image>"}, {"from": "gpt", "value": "B"}],
         "choices": ["red", "blue"], "image": "red.png"},
        "Which?<image>", "blue", [RED],
    ),
    "ms-swift": (
        {"messages": [{"role": "user", "content": "<image>How?"}, {"role": "assistant", "content": "I see 3."}],
         "images": ["red.png"], "solution": "3"},
        "<image>How?", "3", [RED],
    ),
    "ms-swift without an answer": (
        {"messages": [{"role": "user", "content": "How?"}], "images": ["red.png"], "solution": "3"}, "How?", "3", [RED],
    ),
    "an answer in tags": (
        {"messages": [{"role": "user", "content": "How?"},
                      {"role": "assistant", "content": "<think>hm</think><answer>3</answer>"}]},
        "How?", "3", [],
    ),
}  # fmt: skip

# Why another row is left out: how the reason begins, wherever it is given.
UNUSABLE: dict[str, tuple[Any, str]] = {
    "digits among other options": ({**MC, "solution": "1"}, "solution is '1', which is none of the choices"),
    "index or text": ({**MC, "choices": ["1", "2"], "solution": 1}, "its solution (or answer) is the number 1, which"),
    "index beyond": ({**MC, "solution": 2}, "solution is the index 2, but there are 2 choices"),
    "negative index": ({**MC, "solution": -1}, "solution is the index -1"),
    "letter beyond": ({**MC, "solution": "C"}, "solution is the letter C, but there are 2 choices"),
    "none of the choices": ({**MC, "solution": "green"}, "solution is 'green', which is none of the choices"),
    "truth value": ({**OPEN, "solution": True}, "solution is True"),
    "no solution": (OPEN, "solution is None"),
    "null solution": ({**OPEN, "solution": None}, "solution is None"),
    "empty solution": ({**OPEN, "solution": ""}, "solution is ''"),
    "list as solution": ({**OPEN, "solution": ["a"]}, "solution is ['a']"),
    "one choice": ({**MC, "choices": ["red"], "solution": "A"}, "it has 1 options"),
    "eleven choices": ({**MC, "choices": [f"o{n}" for n in range(11)], "solution": "A"}, "it has 11 options"),
    "nested choices": ({**MC, "choices": [["red"], ["blue"]], "solution": "A"}, "one of its options is ['red']"),
    "empty choice": ({**MC, "choices": ["red", ""], "solution": "A"}, "one of its options is empty"),
    "null choice": ({**MC, "choices": ["red", None], "solution": "A"}, "one of its options is None"),
    "the right choice twice": ({**MC, "choices": ["red", "red"], "solution": 0}, ""),
    "choices as prose": ({**MC, "choices": "red or blue", "solution": "A"}, "its options is 'red or blue'"),
    "no problem": (
        {"solution": "x", "image": "red.png"},
        "its prompt (or problem or question) is None: it must be a text",
    ),
    "no messages": ({"prompt": [], "solution": "x"}, "its prompt (or problem or question) is []"),
    "blank problem": ({**OPEN, "problem": " \n", "solution": "x"}, "its problem is ' \\n'"),
    "number as problem": (
        {**OPEN, "problem": 7, "solution": "x"},
        "its prompt is a int: give a text or a conversation (a list of messages)",
    ),
    "placeholder without image": (
        {"problem": "<image>?", "solution": "x"},
        "its prompt has 1 <image> placeholders, but there are 0",
    ),
    "placeholder for one of two": (
        {"problem": "<image>?", "solution": "x", "images": ["red.png", "blue.png"]},
        "its prompt has 1 <image> placeholders, but there are 2 images",
    ),
    "placeholders for one": (
        {**OPEN, "problem": "<image><image>", "solution": "x"},
        "its prompt has 2 <image> placeholders",
    ),
    "placeholder in a choice": (
        {"problem": "Which?", "choices": ["<image>", "blue"], "solution": "A"},
        "its prompt has 1 <image> placeholders, but there are 0 images",
    ),
    "index of A-OKVQA beyond": (
        {"question": "Which?", "choices": ["red", "blue"], "correct_choice_idx": 2},
        "solution is the index 2",
    ),
    "MMMU-Pro's placeholder without image": (
        {"question": "Is <image 2>?", "answer": "x", "image_1": "red.png"},
        "it refers to <image 2>, but there is no",
    ),
    "LLaVA without image": (
        {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "3"}]},
        "its prompt has 1 <image> placeholders, but there are 0",
    ),
    "messages of others": (
        {"messages": [{"role": "tool", "content": "?"}, {"role": "assistant", "content": "3"}]},
        "one of its messages is from 'tool'",
    ),
    "messages of the assistant alone": (
        {"messages": [{"role": "assistant", "content": "3"}]},
        "its messages do not end with a message of the user",
    ),
    "messages without content": ({"messages": [{"role": "user"}]}, "one of its messages has no content"),
    "messages that are none": ({"messages": ["?"]}, "one of its messages is a str"),
    "empty path": ({**OPEN, "image": "", "solution": "x"}, "image is an empty text"),
    "address": ({**OPEN, "image": "https://example.org/a.png", "solution": "x"}, "image is an address (https"),
    "data address": ({**OPEN, "image": "data:image/png;base64,AAAA", "solution": "x"}, "image is an address (data"),
    "folder": ({**OPEN, "image": "folder.png", "solution": "x"}, "image file {folder}/folder.png is a folder"),
    "missing": ({**OPEN, "image": "no.png", "solution": "x"}, "image file {folder}/no.png does not exist"),
    "number as image": ({**OPEN, "image": 3, "solution": "x"}, "image is of type int"),
    "null among images": ({**OPEN, "images": ["red.png", None], "solution": "x"}, "image is of type NoneType"),
    "file of no bytes": ({**OPEN, "image": "empty.png", "solution": "x"}, "image is unreadable: not in a known"),
    "text in a file": ({**OPEN, "image": "text.png", "solution": "x"}, "image is unreadable: not in a known"),
    "truncated": ({**OPEN, "image": "half.jpg", "solution": "x"}, "image is truncated or damaged"),
    "bomb": ({**OPEN, "image": "bomb.png", "solution": "x"}, "image has too many pixels (more than 1000)"),
    "thin": ({**OPEN, "image": "thin.png", "solution": "x"}, "image has size 400x1"),
    "floating point": ({**OPEN, "image": "wild.tiff", "solution": "x"}, "image has mode F and values from -1 to"),
    "half a pair": ({**OPEN, "problem": "a\ud800", "solution": "x"}, "its text "),
    "long number": ('{"problem": "q", "solution": 99999999999999999999}', "the line is not JSON (the integer"),
    "torn line": ('{"problem": "q", "solut', "the line is not JSON"),
    "a list": ("[1, 2]", "the row is a list, not an object"),
    "null": ("null", "the row is a NoneType, not an object"),
}


class Commands:
    """The three commands over one file; what each makes of its rows, and why it leaves others out, by place."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.file = folder, folder / name

    def train(self, streaming: bool = False, file: Path | None = None) -> tuple[dict[int, Any], dict[int, str]]:
        data = DataArguments(data_files=str(file or self.file), dataset_streaming=streaming)
        heard: list[Any] = []
        rows, skipped = load_rows(
            data,
            "train",
            needs_solution=True,
            limit=None,
            on_skipped=heard.append,
            processor=processor,
        )
        return _placed(list(rows), {row.row: row.reason for row in [*heard, *skipped]})

    def inspect(self) -> tuple[int, dict[int, str]]:
        listed = self.folder / "inspected.jsonl"
        found = inspect_rows(
            data_inspect.inspect_parser().parse_args(
                [str(self.file), "--tiny", "--samples", "0", "--skipped", str(listed)]
            )
        )
        left_out = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
        return found.usable, {row["row"]: row["reason"] for row in left_out}

    def convert(self) -> tuple[dict[int, Any], dict[int, str]]:
        """Rows are read again as `train` reads what was written."""
        out = self.folder / "converted"
        flags = ["jsonl", "--data_files", str(self.file), "--output_dir", str(out), "--workers", "0"]
        data_convert.convert_run(data_convert.convert_parser().parse_args(flags))
        rows, skipped = self.train(file=out / "train-00000.parquet")
        assert not skipped
        return _placed(list(rows.values()), {row["row"]: row["reason"] for row in skipped_in(out)})


def _placed(rows: list[Any], reasons: dict[int, str]) -> tuple[dict[int, Any], dict[int, str]]:
    places = [place for place in range(len(rows) + len(reasons)) if place not in reasons]
    return dict(zip(places, rows, strict=True)), reasons


def said(row: dict[str, Any]) -> tuple[str, str, list[tuple[int, int, int]]]:
    """What a ready row says: the question with its options, the text of the right answer, the corners of its images."""
    parts = row["prompt"][-1]["content"]
    if not isinstance(parts, str):
        parts = "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)
    stated = row.get("solution") if row.get("solution") is not None else row["label_idx"]
    corners = [image.getpixel((0, 0)) for image in images_of(row)]
    return parts, resolve_solution(stated, row.get("choices")).text, corners


def processor():
    return build_processor([])


NAMES = [*USABLE, *UNUSABLE]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_images(folder)
    given = [USABLE[name][0] if name in USABLE else UNUSABLE[name][0] for name in NAMES]
    lines = [row if isinstance(row, str) else json.dumps(row) for row in given]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        yield Commands(folder, "rows.jsonl")


def write_images(folder: Path) -> None:
    (folder / "folder.png").mkdir()
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    colours = {"red.png": RED, "blue.png": BLUE}
    for name, colour in colours.items():
        Image.new("RGB", (8, 6), colour).save(folder / name)
    Image.new("I;16", (8, 6), 257 * 128).save(folder / "deep.png")
    Image.new("L", (8, 6), 128).save(folder / "grey.png")
    Image.new("CMYK", (8, 6), (255, 0, 0, 0)).save(folder / "cmyk.jpg", quality=100)
    Image.new("RGBA", (8, 6), (*RED, 0)).save(folder / "clear.png")
    Image.new("RGB", (8, 6), BLUE).quantize(4).save(folder / "palette.png")
    frames = [Image.new("RGB", (8, 6), colour) for colour in (RED, BLUE)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("F", (8, 6), -1.0).save(folder / "wild.tiff")
    Image.new("RGB", (40, 30)).save(folder / "bomb.png")
    Image.new("RGB", (400, 1)).save(folder / "thin.png")
    (folder / "half.jpg").write_bytes(encoded(Image.effect_noise((30, 30), 80), "JPEG")[:600])
    turned = Image.new("RGB", (32, 16), RED)
    turned.paste(BLUE, (0, 8, 32, 16))  # the lower half; orientation 6 has the first column of what is shown there
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif, quality=100, subsampling=0)


@pytest.fixture(scope="module")
def found(commands):
    return {
        "train": commands.train(),
        "stream": commands.train(streaming=True),
        "inspect": commands.inspect(),
        "convert": commands.convert(),
    }


def test_usable_rows_say_the_same(found):
    for name, (_, question, answer, corners) in USABLE.items():
        place = NAMES.index(name)
        assert place not in found["inspect"][1], name
        read = [said(found[command][0][place]) for command in ("train", "stream", "convert")]
        assert len({text for text, _, _ in read}) == 1, name
        for text, right, seen in read:
            assert (text.split("\nA. ")[0], right, len(seen)) == (question, answer, len(corners)), name
            for colour, expected in zip(seen, corners, strict=True):
                assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= 3, name


def test_other_rows_are_left_out_for_the_same_reason(commands, found):
    for name, (_, beginning) in UNUSABLE.items():
        reasons = {what[1].get(NAMES.index(name)) for what in found.values()}
        assert len(reasons) == 1, (name, reasons)
        assert (reasons.pop() or "").startswith(beginning.format(folder=commands.folder)), name


def test_all_rows_are_counted(found):
    assert found["inspect"][0] == len(found["train"][0]) == len(USABLE)


@pytest.mark.parametrize(
    "name", ["index", "digits", "leading zeros", "integer", "choices as a text", "A-OKVQA", "LLaVA"]
)
def test_a_row_means_the_same_without_its_neighbours(commands, found, name):
    file = commands.folder / "alone.jsonl"
    file.write_text(json.dumps(USABLE[name][0]), encoding="utf-8")
    assert said(commands.train(file=file)[0][0]) == said(found["train"][0][NAMES.index(name)])


def latin(folder: Path) -> None:
    good, bad = (json.dumps({"problem": word, "solution": "x"}, ensure_ascii=False) for word in ("q", "schön"))
    (folder / "rows.jsonl").write_bytes(good.encode() + b"\n" + bad.encode("latin-1"))


def no_rows(folder: Path) -> None:
    types = [("problem", pyarrow.string()), ("solution", pyarrow.string())]
    pyarrow.parquet.write_table(pyarrow.schema(types).empty_table(), folder / "rows.parquet")


def typed(folder: Path) -> None:
    rows = [{"problem": "q", "solution": "x", "image": picture(RED)}, {"problem": "q", "solution": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")


@pytest.mark.parametrize(
    ("name", "write", "left_out"),
    [
        ("rows.jsonl", latin, {1: "the line is not UTF-8"}),
        ("rows.parquet", typed, {1: "solution is None: give the right answer as a text or a number, or add choices"}),
    ],
)
def test_files_with_a_row_that_is_left_out(tmp_path, name, write, left_out):
    write(tmp_path)
    commands = Commands(tmp_path, name)
    for found in (commands.train(), commands.train(streaming=True), commands.inspect(), commands.convert()):
        assert found[1] == left_out


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("rows.parquet", no_rows, "no rows"),
        ("rows.jsonl", lambda folder: (folder / "rows.jsonl").write_text("\n \n"), "no rows"),
        ("rows.json", lambda folder: (folder / "rows.json").write_text("[]"), "no rows"),
        (
            "rows.jsonl",
            lambda folder: (folder / "rows.jsonl").touch(),
            "is empty",
        ),
        ("rows.parquet", lambda folder: (folder / "rows.parquet").write_bytes(b"PAR1 torn"), "cannot be read"),
        ("rows.jsonl", lambda folder: (folder / "rows.jsonl").write_text('{"text": "q"}'), "(its prompt|`prompt`)"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, write, words):
    write(tmp_path)
    commands = Commands(tmp_path, name)
    for run in (commands.train, lambda: commands.train(streaming=True), commands.inspect, commands.convert):
        with pytest.raises(VGRError, match=words):
            run()
