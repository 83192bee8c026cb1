import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from convert_worker import candidates, output
from datasets import load_dataset
from PIL import Image
from support.launching import SECONDS, environment
from support.made_sets import encoded, picture, rows_in, skipped_in, written

from vgr_trl import utils as files
from vgr_trl.data import convert as convert_module
from vgr_trl.data import convert as progress
from vgr_trl.data import convert as write
from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.convert import Output, SkippedLog, convert, statistics_in
from vgr_trl.data.rows import prepare_rows
from vgr_trl.utils import ConfigError, DataError

CHOICES = ["red", "blue"]


def question(number: int = 0, **changed) -> Question:
    fields = {"id": f"q{number}", "source": "made", "problem": "Which colour?", "solution": "A", "choices": CHOICES}
    return Question(**({**fields, "images": [picture((number, 0, 0))]} | changed))


def given(*found):
    return [(Origin("file", row), item) for row, item in enumerate(found)]


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
    assert [[image.getpixel((0, 0)) for image in images] for images in inside["images"]] == [
        [(9, 9, 9), (1, 0, 0)],
        [(9, 9, 9)],
    ]
    lines = [json.loads(line) for line in (tmp_path / "jsonl" / "train-00000.jsonl").read_text().splitlines()]
    assert lines[0]["images"][0] == lines[1]["images"][0]  # the same image is one file
    assert len(list((tmp_path / "jsonl" / "images").rglob("*.png"))) == 2
    beside = load_dataset(str(tmp_path / "jsonl"), split="train", cache_dir=str(tmp_path / "cache"))
    prepared, skipped = prepare_rows(beside, root=tmp_path / "jsonl")
    assert skipped == []
    assert [image.getpixel((0, 0)) for image in prepared[0]["images"]] == [(9, 9, 9), (1, 0, 0)]


def test_row_groups_and_files_are_bounded(tmp_path, monkeypatch):
    written(given(*map(question, range(250))), tmp_path / "a", rows_per_file=220)
    stored = [pyarrow.parquet.read_metadata(tmp_path / "a" / f"train-0000{number}.parquet") for number in (0, 1)]
    assert [[data.row_group(i).num_rows for i in range(data.num_row_groups)] for data in stored] == [
        [100, 100, 20],
        [30],
    ]
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", int(2.5 * len(picture()["bytes"])))
    written(given(*map(question, range(7))), tmp_path / "b")
    data = pyarrow.parquet.read_metadata(tmp_path / "b" / "train-00000.parquet")
    assert [data.row_group(i).num_rows for i in range(data.num_row_groups)] == [3, 3, 1]
    assert [row["id"] for row in rows_in(tmp_path / "b")] == [f"q{number}" for number in range(7)]


def test_a_row_with_several_images_in_a_set_of_one_is_left_out(tmp_path):
    written(given(question(), question(images=[picture(), picture()])), tmp_path)
    assert skipped_in(tmp_path)[0]["reason"] == "it has 2 images, where one is expected"


def test_it_stops_at_the_limit(tmp_path):
    done = written(given("bad", *map(question, range(9))), tmp_path, limit=5, rows_per_file=2)
    assert (done.rows, done.parts, done.done) == (5, 3, True)
    assert [row["id"] for row in rows_in(tmp_path)] == ["q0", "q1", "q2", "q3", "q4"]


def test_nothing_left_is_an_error(tmp_path):
    for folder, found, words in (
        (
            "a",
            ["its answer is 3", "its answer is 4", "it has no image"],
            "None of the 3 rows can be used; 2 because: its",
        ),
        ("b", [], "There are no rows to write: the source has none that are asked for."),
    ):
        for _ in range(2):
            with pytest.raises(DataError, match=re.escape(words)):
                written(given(*found), tmp_path / folder)
        assert not list((tmp_path / folder).glob("train-*"))


def test_two_processes_give_the_same_as_none(tmp_path):
    convert(candidates(100), output(tmp_path / "none"), "the same")
    convert(candidates(100), output(tmp_path / "two", workers=2), "the same")
    assert rows_in(tmp_path / "two") == rows_in(tmp_path / "none")
    assert len(rows_in(tmp_path / "two")) == 100 - 14
    assert skipped_in(tmp_path / "two") == skipped_in(tmp_path / "none")


class Killed(BaseException):
    """Stands for the end of the process: nothing after it is done."""


def leave(run) -> None:
    """Close the files as the end of a process does, and take nothing back."""
    run.log.close()
    if run.part is not None:
        (run.part.file if hasattr(run.part, "file") else run.part.writer).close()


def kill_at(monkeypatch, module, name, call, *, after=False):
    """Let the `call`-th call of a function be the last thing that happens."""
    function, calls = getattr(module, name), []

    def dying(*args, **options):
        calls.append(args)
        if len(calls) != call:
            return function(*args, **options)
        if after:
            function(*args, **options)
        raise Killed

    monkeypatch.setattr(module, name, dying)


@pytest.mark.parametrize(
    ("module", "name", "call", "after"),
    [
        (files, "publish", 1, False),  # the first thing written down, before any row
        (write, "publish", 1, False),
        (write, "publish", 2, False),
        (write, "publish", 2, True),  # the file has its name, but it is not written down that it has
        (progress, "write_whole", 2, False),
        (progress, "write_whole", 3, True),
        (progress, "write_whole", 5, True),  # the very end
        (convert_module, "PARTS", 0, False),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_whenever_it_is_killed_the_next_run_ends_the_same(tmp_path, monkeypatch, module, name, call, after, kind):
    plain, resumed = (replace(output(tmp_path / folder), kind=kind) for folder in ("plain", "resumed"))
    expected = convert(candidates(100), plain, "the same")
    with monkeypatch.context() as patch:
        patch.setattr(convert_module._Run, "close", leave)
        if name == "PARTS":
            source = (
                found if row < 77 else (_ for _ in ()).throw(Killed()) for row, found in enumerate(candidates(100))
            )
        else:
            source = candidates(100)
            kill_at(patch, module, name, call, after=after)
        with pytest.raises(Killed):
            convert(source, resumed, "the same")
    left = {path.name: path.read_bytes() for path in resumed.folder.glob("train-*")}
    whole = {path.name: path.read_bytes() for path in plain.folder.glob("train-*")}
    assert left.items() <= whole.items()  # what has its name is whole
    assert convert(candidates(100), resumed, "the same") == expected
    assert {path.name: path.read_bytes() for path in resumed.folder.glob("train-*")} == whole
    assert skipped_in(resumed.folder) == skipped_in(plain.folder)
    assert not [path for path in resumed.folder.rglob("*") if "unfinished" in path.name]


@pytest.mark.skipif(os.name == "nt", reason="kills by signal")
def test_a_killed_process_is_continued_and_its_workers_end(tmp_path):
    """At row 90 at most 48 rows are on their way, so that a file of 20 is there."""
    command = [sys.executable, str(Path(__file__).with_name("convert_worker.py")), str(tmp_path / "out"), "100", "90"]
    process = subprocess.Popen(command, start_new_session=True, env=environment())
    until(lambda: parts_in(tmp_path / "out") >= 1 or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = (tmp_path / "out" / "train-00000.parquet").stat()
    assert len(rows_in(tmp_path / "out")) < 86
    until(lambda: not alive(process.pid))
    convert(candidates(100), output(tmp_path / "out"), "the same")
    convert(candidates(100), output(tmp_path / "plain"), "the same")
    assert rows_in(tmp_path / "out") == rows_in(tmp_path / "plain")
    assert skipped_in(tmp_path / "out") == skipped_in(tmp_path / "plain")
    found = (tmp_path / "out" / "train-00000.parquet").stat()
    assert (found.st_ino, found.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)  # not made again


def parts_in(folder: Path) -> int:
    """Files that are finished and written down as such."""
    path = folder / ".train.progress.json"
    return json.loads(path.read_text())["parts"] if path.exists() else 0


def until(reached) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_conversion_is_not_made_again(tmp_path):
    first = written(given(question(1)), tmp_path)
    assert written(iter(lambda: pytest.fail("read again"), None), tmp_path) == first


def test_another_conversion_is_refused(tmp_path):
    convert(given(question(1)), Output(tmp_path / "a", workers=0), {"set": "a", "seed": 0})
    with pytest.raises(ConfigError, match="holds a conversion with other seed: choose another folder"):
        convert(given(question(1)), Output(tmp_path / "a", workers=0), {"set": "a", "seed": 1})
    (tmp_path / "a" / ".train.progress.json").write_text("{")
    with pytest.raises(ConfigError, match="progress.json cannot be read"):
        written(given(question(1)), tmp_path / "a")


def test_what_has_failed_is_begun_anew_in_the_same_folder(tmp_path):
    output = Output(tmp_path, workers=0)
    with pytest.raises(DataError, match="None of the 1 rows can be used"):
        convert(given("it has no image"), output, {"answer_key": "label"})
    convert(given("its answer is 3", question(1)), output, {"answer_key": "answer"})
    assert [row["id"] for row in rows_in(tmp_path)] == ["q1"]
    assert [row["reason"] for row in skipped_in(tmp_path)] == ["its answer is 3"]


def test_a_file_that_a_kill_left_is_not_mixed_with_another_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(SkippedLog, "end", lambda self: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        convert(given(question(1)), Output(tmp_path, workers=0), {"seed": 0})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=re.escape("has train-00000.parquet, which no conversion here made")):
        convert(given(question(1)), Output(tmp_path, workers=0, kind="jsonl"), {"seed": 1})
    assert convert(given(question(1)), Output(tmp_path, workers=0), {"seed": 0}).rows == 1


@pytest.mark.parametrize("name", ["train.parquet", "mine.jsonl", "ids.json", "train-00000.parquet", "train-00000.csv"])
def test_a_folder_with_other_rows_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=re.escape(f"has {name}, which no conversion here made, and which would be")):
        written(given(question(1)), tmp_path)


def test_splits_share_a_folder_one_after_the_other(tmp_path, monkeypatch):
    written(given("bad", question(1)), tmp_path, split="train")
    monkeypatch.setattr(SkippedLog, "end", lambda self: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        written(given("worse", question(2)), tmp_path, split="validation")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="a conversion of validation that is not finished: finish it first"):
        written(given(question(3)), tmp_path, split="test")
    written(given("worse", question(2)), tmp_path, split="validation")
    written(given(question(3)), tmp_path, split="test")
    assert [row["reason"] for row in skipped_in(tmp_path)] == ["bad", "worse"]


def test_a_finished_file_that_is_gone_is_missed(tmp_path):
    written(given(question(1)), tmp_path)
    (tmp_path / "train-00000.parquet").unlink()
    with pytest.raises(ConfigError, match=r"train-00000.parquet was finished and is missing: put it back, or delete"):
        written(given(question(1)), tmp_path)


def test_damaged_progress_of_another_split_is_named(tmp_path):
    (tmp_path / ".test.progress.json").write_text("{")
    with pytest.raises(ConfigError, match=r".test.progress.json cannot be read"):
        written(given(question(1)), tmp_path)
    with pytest.raises(ConfigError, match=r".test.progress.json cannot be read"):
        statistics_in(tmp_path)


def test_two_at_once_are_refused(tmp_path):
    with (
        progress.alone_in(tmp_path),
        pytest.raises(ConfigError, match="Another process is writing to"),
    ):
        written(given(question(1)), tmp_path)


def test_an_image_cut_short_by_a_crash_is_written_again(tmp_path):
    written(given(question(1)), tmp_path / "a", kind="jsonl")
    (image,) = (tmp_path / "a" / "images").rglob("*.png")
    data = image.read_bytes()
    image.write_bytes(b"")
    (tmp_path / "a" / ".train.progress.json").unlink()
    (tmp_path / "a" / "train-00000.jsonl").unlink()
    written(given(question(1)), tmp_path / "a", kind="jsonl")
    assert image.read_bytes() == data


def test_images_become_rgb_within_the_limits(tmp_path):
    clear = {"bytes": encoded(Image.new("RGBA", (3000, 1500), (0, 0, 0, 0))), "path": None}
    written(given(question(images=[clear])), tmp_path)
    image = Image.open(io.BytesIO(rows_in(tmp_path)[0]["image"]["bytes"]))
    assert (image.mode, image.size, image.getpixel((5, 5))) == ("RGB", (2048, 1024), (255, 255, 255))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "csv"}, "The output format is 'csv': give one of parquet, jsonl"),
        ({"split": "../x"}, "The output split is '../x': give a word"),
        ({"rows_per_file": 0}, "rows_per_file is 0: give an integer of at least 1"),
        ({"limit": 0}, "limit is 0"),
        ({"workers": -1}, "workers is -1"),
    ],
)
def test_options_out_of_range(tmp_path, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Output(tmp_path, **options)
