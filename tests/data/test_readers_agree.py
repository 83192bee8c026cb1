import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from support.made_sets import corners, encoded, jsonl, loaded, parquet, picture, skipped_in

from vgr_trl.cli.data import convert_run, inspect_run, make_parser
from vgr_trl.rewards import resolve_solution

COLOURS = {"red": (200, 30, 40), "blue": (10, 20, 250)}
RED, BLUE = COLOURS.values()
PNG = base64.b64encode(picture(RED)["bytes"]).decode()
JPEG = base64.encodebytes(encoded(Image.new("RGB", (8, 6), BLUE), "JPEG", quality=100)).decode()  # in lines of 76
Read = tuple[dict[int, Any], dict[int, str]]
LATIN = b'{"problem": "q", "solution": "x"}\n{"problem": "sch\xf6n", "solution": "x"}'


def cases(kind: str) -> dict[str, dict[str, Any]]:
    text = json.dumps(yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text(encoding="utf-8"))[kind])
    for name, value in (("PNG_TORN", PNG[:-1]), ("PNG", PNG), ("JPEG", json.dumps(JPEG)[1:-1])):
        text = text.replace(name, value)
    return {case.pop("name"): case for case in json.loads(text)}


USABLE, UNUSABLE = cases("usable"), cases("unusable")
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


ROWS = {name: case["row"] for name, case in {**USABLE, **UNUSABLE}.items()}
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
    for name, case in USABLE.items():
        answer, expected = case["means"]["answer"], [COLOURS[colour] for colour in case["means"]["shows"]]
        read = [content(found[command][0][NAMES.index(name)]) for command in ("train", "stream", "convert")]
        assert len({text for text, _, _ in read}) == 1, name
        for text, right, seen in read:
            assert (text.split("\nA. ")[0], right, len(seen)) == (case["asks"], answer, len(expected)), name
            for colour, right in zip(seen, expected, strict=True):
                assert max(abs(a - b) for a, b in zip(colour, right, strict=True)) <= 3, name


def test_other_rows_are_left_out_for_the_same_reason(file, found):
    for name, case in UNUSABLE.items():
        reasons = {left_out.get(NAMES.index(name)) for _, left_out in found.values()}
        assert len(reasons) == 1, (name, reasons)
        assert (reasons.pop() or "").startswith(case["reason"].format(folder=file.parent)), name


@pytest.mark.parametrize("name", ["leading zeros", "choices as a text", "LLaVA"])
def test_a_row_means_the_same_without_its_neighbours(file, found, name):
    alone = jsonl(file.with_name("alone.jsonl"), [ROWS[name]])
    assert content(train(alone)[0][0]) == content(found["train"][0][NAMES.index(name)])


@pytest.mark.parametrize("command", COMMANDS)
def test_files_with_a_row_that_is_left_out(tmp_path, command):
    right = {"problem": "q", "solution": "x", "image": picture(RED)}
    rows = [right, {"problem": "q", "solution": None}, *[right] * 8]
    _, reasons = COMMANDS[command](parquet(tmp_path / "a" / "rows.parquet", rows))
    assert reasons == {1: "solution is None: give the right answer, a text or a number"}
    (tmp_path / "rows.jsonl").write_bytes(LATIN)
    assert COMMANDS[command](tmp_path / "rows.jsonl")[1] == {1: "the line is not UTF-8"}
