import io
import json
import os
import re
import sys

import pyarrow.parquet
import pytest
from datasets import load_dataset
from PIL import Image
from support.made_sets import encoded, picture, rows_in, skipped_in, written

from vgr_trl.data import convert as convert_module
from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.convert import (
    ROWS_PER_TASK,
    TASKS_PER_WORKER,
    Encoded,
    Output,
    Statistics,
    convert,
    encode_candidates,
    figures,
    kind_of,
    on_one_line,
    plot,
    report,
    statistics_in,
    tables,
)
from vgr_trl.data.rows import prepare_rows
from vgr_trl.utils import ConfigError, DataError

CHOICES = ["red", "blue"]


def question(number: int = 0, **changed) -> Question:
    fields = {"id": f"q{number}", "source": "made", "problem": "Which colour?", "solution": "A", "choices": CHOICES}
    return Question(**({**fields, "images": [picture((number, 0, 0))]} | changed))


def given(*found):
    return [(Origin("file", row), item) for row, item in enumerate(found)]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}


def test_rows_are_read_back_by_datasets_and_by_training(tmp_path):
    bad = question(2, images=[{"bytes": b"no image", "path": None}])
    written(given(question(1), "it is bad", bad, question(3, choices=None, solution="dark red")), tmp_path / "out")
    rows = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.column_names == ["id", "source", "problem", "solution", "choices", "image"]
    assert rows["id"] == ["q1", "q3"]
    assert rows["choices"] == [CHOICES, None]
    assert rows["solution"] == ["A", "dark red"]
    assert [image.getpixel((0, 0)) for image in rows["image"]] == [(1, 0, 0), (3, 0, 0)]
    prepared, skipped = prepare_rows(rows)
    assert (len(prepared), skipped) == (2, [])
    stream = load_dataset(str(tmp_path / "out"), split="train", streaming=True)
    assert [row["image"].size for row in stream] == [(12, 8)] * 2
    assert skipped_in(tmp_path / "out") == [
        {"file": "file", "row": 1, "reason": "it is bad"},
        {"file": "file", "row": 2, "reason": "image is unreadable: not in a known image format"},
    ]


def test_several_images_and_jsonl(tmp_path):
    same = picture((9, 9, 9))
    rows = given(question(0, images=[same, picture((1, 0, 0))]), question(1, images=[same]))
    written(rows, tmp_path / "parquet", several_images=True)
    written(rows, tmp_path / "jsonl", several_images=True, kind="jsonl")
    inside = load_dataset(str(tmp_path / "parquet"), split="train", cache_dir=str(tmp_path / "cache"))
    colours = [[image.getpixel((0, 0)) for image in images] for images in inside["images"]]
    assert colours == [[(9, 9, 9), (1, 0, 0)], [(9, 9, 9)]]
    lines = [json.loads(line) for line in (tmp_path / "jsonl" / "train-00000.jsonl").read_text().splitlines()]
    assert lines[0]["images"][0] == lines[1]["images"][0]  # the same image is one file
    assert len(list((tmp_path / "jsonl" / "images").rglob("*.png"))) == 2
    beside = load_dataset(str(tmp_path / "jsonl"), split="train", cache_dir=str(tmp_path / "cache"))
    prepared, skipped = prepare_rows(beside, root=tmp_path / "jsonl")
    assert skipped == []
    assert [image.getpixel((0, 0)) for image in prepared[0]["images"]] == [(9, 9, 9), (1, 0, 0)]


def test_row_groups_and_files_are_bounded(tmp_path):
    assert written(given(*map(question, range(250))), tmp_path, rows_per_file=220).rows == 250
    stored = [pyarrow.parquet.read_metadata(tmp_path / f"train-0000{number}.parquet") for number in (0, 1)]
    groups = [[data.row_group(i).num_rows for i in range(data.num_row_groups)] for data in stored]
    assert groups == [[100, 100, 20], [30]]


def test_rows_that_have_no_place_in_the_columns_are_left_out(tmp_path):
    film = question(images=[picture()], videos=["film.mp4"])
    written(given(question(), question(images=[picture(), picture()]), film), tmp_path)
    assert [row["reason"] for row in skipped_in(tmp_path)] == [
        "it has 2 images, where one is expected",
        "it has a video, but the set's first row has no column of videos",
    ]


def test_it_stops_at_the_limit(tmp_path):
    assert written(given("bad", *map(question, range(9))), tmp_path, limit=5, rows_per_file=2).rows == 5
    assert [row["id"] for row in rows_in(tmp_path)] == ["q0", "q1", "q2", "q3", "q4"]
    assert len(list(tmp_path.glob("train-*"))) == 3


def test_nothing_left_is_an_error_and_may_be_corrected_in_the_same_folder(tmp_path):
    found = ["its answer is 3", "its answer is 4", "it has no image"]
    with pytest.raises(DataError, match="None of the 3 rows can be used; 2 because: its answer is …"):
        convert(given(*found), Output(tmp_path, workers=0), {"answer_key": "label"})
    assert len(skipped_in(tmp_path)) == 3
    with pytest.raises(DataError, match="There are no rows to write"):
        written([], tmp_path)
    convert(given("its answer is 3", question(1)), Output(tmp_path, workers=0), {"answer_key": "answer"})
    assert [row["id"] for row in rows_in(tmp_path)] == ["q1"]
    assert [row["reason"] for row in skipped_in(tmp_path)] == ["its answer is 3"]


def test_two_processes_give_the_same_as_none(tmp_path):
    bad = question(images=[{"bytes": b"none", "path": None}])
    rows = given(*(("it is bad", bad, question(number))[number % 7 > 1] if number % 7 < 2 else question(number)
                   for number in range(100)))  # fmt: skip
    for workers in (0, 2):
        convert(rows, Output(tmp_path / str(workers), rows_per_file=20, workers=workers))
    assert files_in(tmp_path / "0").keys() == files_in(tmp_path / "2").keys()
    assert rows_in(tmp_path / "0") == rows_in(tmp_path / "2")
    assert skipped_in(tmp_path / "0") == skipped_in(tmp_path / "2")


def test_few_rows_are_held_at_a_time(tmp_path):
    read = []

    def rows():
        for number in range(100):
            read.append(number)
            yield Origin("f", number), question(number)

    ahead = [len(read) - origin.row for (origin, _), _ in encode_candidates(rows(), Output(tmp_path, workers=1))]
    assert max(ahead) <= ROWS_PER_TASK * TASKS_PER_WORKER


class Deadly:
    """Ends the process that unpacks it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_worker_that_ends_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="A process that decodes images ended unexpectedly"):
        convert(given(question(images=[Deadly()])), Output(tmp_path, workers=1))


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_after_a_kill_at_a_row_nothing_is_there_and_the_same_call_ends_the_same(tmp_path, kind):
    rows = given(*("bad" if number % 7 == 3 else question(number) for number in range(60)))
    plain, killed = (Output(tmp_path / name, kind=kind, rows_per_file=20, workers=0) for name in ("plain", "killed"))
    convert(rows, plain, "same")

    def broken():
        yield from rows[:50]
        raise Killed

    with pytest.raises(Killed):
        convert(broken(), killed, "same")
    assert not files_in(killed.folder)
    (killed.folder / ".train-00000.parquet.unfinished").write_bytes(b"torn")  # what a signal leaves
    assert convert(rows, killed, "same") == convert(rows, plain, "same")
    shown = {name: data for name, data in files_in(killed.folder).items() if not name.startswith(".")}
    assert shown == {name: data for name, data in files_in(plain.folder).items() if not name.startswith(".")}


def test_what_is_finished_is_not_made_again_unless_a_file_is_missing(tmp_path):
    first = written(given(question(1)), tmp_path)
    assert written(iter(lambda: pytest.fail("read again"), None), tmp_path) == first
    (tmp_path / "train-00000.parquet").unlink()
    assert written(given(question(1)), tmp_path) == first
    assert len(rows_in(tmp_path)) == 1


def test_a_folder_with_other_rows_is_refused(tmp_path):
    convert(given(question(1)), Output(tmp_path, workers=0), {"set": "a", "seed": 0})
    with pytest.raises(ConfigError, match="holds a conversion with other seed: choose another folder"):
        convert(given(question(1)), Output(tmp_path, workers=0), {"set": "a", "seed": 1})
    for name in ("mine.jsonl", "test-00000.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"has {name}, which no finished conversion made"):
            written(given(question(1)), tmp_path, split="validation")
        (tmp_path / name).unlink()


def test_splits_share_a_folder(tmp_path):
    written(given("bad", question(1)), tmp_path, split="train")
    written(given("worse", question(2)), tmp_path, split="test")
    assert [row["reason"] for row in skipped_in(tmp_path)] == ["bad", "worse"]
    assert {split: found.rows for split, found in statistics_in(tmp_path).items()} == {"train": 1, "test": 1}


def test_an_image_cut_short_by_a_crash_is_written_again(tmp_path):
    written(given(question(1)), tmp_path, kind="jsonl")
    (image,) = (tmp_path / "images").rglob("*.png")
    data = image.read_bytes()
    image.write_bytes(b"")
    (tmp_path / "train-00000.jsonl").unlink()
    written(given(question(1)), tmp_path, kind="jsonl")
    assert image.read_bytes() == data


def test_images_become_rgb_within_the_limits(tmp_path):
    clear = {"bytes": encoded(Image.new("RGBA", (3000, 1500), (0, 0, 0, 0))), "path": None}
    written(given(question(images=[clear])), tmp_path)
    image = Image.open(io.BytesIO(rows_in(tmp_path)[0]["image"]["bytes"]))
    assert (image.mode, image.size, image.getpixel((5, 5))) == ("RGB", (2048, 1024), (255, 255, 255))


@pytest.mark.parametrize("options", [{"rows_per_file": 0}, {"limit": 0}, {"workers": -1}])
def test_options_out_of_range(tmp_path, options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}")):
        Output(tmp_path, **options)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(convert_module.WRITERS, "parquet", full)
    with pytest.raises(OSError, match="No space left"):
        written(given(question(1)), tmp_path)
    assert not files_in(tmp_path)


def counted() -> Statistics:
    found = Statistics()
    for number in range(3):
        asked = Question(str(number), "$5 set", "Which?", "AB"[number % 2], ["image"], ["x", "y"])
        found.add(asked, [Encoded(b"", ".png", 640, 480)])
    found.add(Question("3", "other", "Which?", "B", ["image"] * 2), [Encoded(b"", ".png", 8, 2000)] * 2)
    found.skip("image file /a/b.png does not exist")
    found.skip("image file /c/d.png does not exist")
    found.skip("it has no image")
    return found


REPORT = """4 rows

rows by source
          3   75.0%  $5 set
          1   25.0%  other

rows by number of choices
          3   75.0%  2
          1   25.0%  open

multiple-choice rows by right letter
          2   66.7%  A
          1   33.3%  B

commonest answers to open questions
          1  100.0%  B

rows by number of images
          3   75.0%  1
          1   25.0%  2

images by pixels of the shorter side
          2   40.0%  below 32
          3   60.0%  256 to 511

left out
          2   66.7%  image file … does not exist
          1   33.3%  it has no image
"""


def test_the_report_by_hand():
    assert report(counted()) == REPORT
    assert report(Statistics()) == "0 rows\n"


def test_the_commonest_answers_to_open_questions_come_first_and_the_rest_together():
    found = Statistics()
    for number in range(40):
        for _ in range(3 if number == 7 else 1):
            asked = Question(str(number), "set", "What?", f"answer  {number}" + "!" * 200, ["image"])
            found.add(asked, [Encoded(b"", ".png", 8, 8)])
    (first, *middle, last) = tables(found)["answers"].items()
    assert first == ("answer 7" + "!" * 72, 3)
    assert [count for _, count in middle] == [1] * 11
    assert last == ("others", 28)


def test_no_more_answers_are_counted_than_memory_has_room_for(monkeypatch):
    monkeypatch.setattr("vgr_trl.data.convert.MOST_ANSWERS", 2)
    found = Statistics()
    for text in "abcabc":
        found.add(Question(text, "set", "What?", text, ["image"]), [Encoded(b"", ".png", 8, 8)])
    assert found.answers == {"a": 2, "b": 2, "others": 2}


def test_counts_survive_being_written_down():
    assert Statistics.of(json.loads(json.dumps(vars(counted())))) == counted()


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (
            "image has 5000x900 pixels, more than max_image_pixels=10",
            "image has 1x2 pixels, more than max_image_pixels=3",
            "image has … pixels, more than max_image_pixels=…",
        ),
        (
            "solution is 'red', which is none of the choices",
            "solution is 'a, b', which is none of the choices",
            "solution is …, which is none of the choices",
        ),
        ("the line is not JSON (line 1)", "the line is not JSON (Expecting value)", "the line is not JSON …"),
        (
            "image file /a/my images/x y.png does not exist",
            "image file b.png does not exist",
            "image file … does not exist",
        ),
        ("video file /a/1.mp4 does not exist", "video file c/d.avi does not exist", "video file … does not exist"),
        (
            "is the number 3, which is one option's text and could be another's index",
            "is the number 10, which is one option's text and could be another's index",
            "is the number …, which is one option's text and could be another's index",
        ),
        ("the line is not UTF-8", "the line is not UTF-8", "the line is not UTF-8"),
    ],
)
def test_reasons_of_a_kind_are_counted_together(one, other, kind):
    assert kind_of(one) == kind_of(other) == kind


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b", "a b"), ("\x1b[31mred\x07", r"\x1b[31mred\x07"), ("x\u202ey", r"x\u202ey"), ("汉字 é 🎉", "汉字 é 🎉")],
)
def test_names_of_the_data_neither_break_lines_nor_steer_a_terminal(text, shown):
    assert on_one_line(text) == shown
    statistics = Statistics()
    statistics.count(text, None, 1)
    assert f"          1  100.0%  {shown}" in report(statistics).splitlines()


def test_the_plot_shows_every_table(tmp_path):
    pytest.importorskip("matplotlib")
    plot({"train": counted(), "test": counted()}, tmp_path / "new" / "set.svg")
    drawing = (tmp_path / "new" / "set.svg").read_text(encoding="utf-8")
    for title in re.findall(r"\n\n(.+)", REPORT):
        assert f"<!-- {title} -->" in drawing
    assert "<!-- train -->" in drawing
    assert "<!-- test -->" in drawing
    plot({"train": counted()}, tmp_path / "set.png")
    assert (tmp_path / "set.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=re.escape("pip install vgr_trl[plots]")):
        figures()
