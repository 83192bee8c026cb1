import os
import sys
import warnings
from contextlib import suppress
from itertools import count

import pytest
from datasets import Dataset
from support.made_sets import jsonl, picture, rows_in, skipped_in, written

from vgr_trl.cli.data import main
from vgr_trl.data.convert import CONVERTERS, Rules, convert_rows, to_schema
from vgr_trl.errors import ConfigError, DataError

CHOICES = ["red", "blue"]


def question(number: int = 0, **changed):
    fields = {"id": f"q{number}", "source": "made", "problem": "Which colour?", "solution": "A", "choices": CHOICES}
    return fields | {"images": [picture((number, 0, 0))]} | changed


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_left_is_an_error_and_may_be_corrected_in_the_same_folder(tmp_path):
    bad = [question(n, solution=text) for n, text in enumerate(("green", "teal", ""))]
    with pytest.raises(DataError):
        written(bad, tmp_path)
    assert len(skipped_in(tmp_path)) == 3
    written([bad[0], question(1)], tmp_path)
    assert [row["id"] for row in rows_in(tmp_path)] == ["q1"]
    (left,) = skipped_in(tmp_path)
    assert (left["row"], left["reason"][:19]) == (0, "solution is 'green'")


def test_two_processes_give_the_same_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr("vgr_trl.data.convert.ROWS_PER_FILE", 20)
    rows = [question(n, solution="A" if n % 7 else "green") for n in range(100)]
    file = jsonl(tmp_path / "rows.jsonl", [{**row, "images": None} for row in rows])
    for workers in (0, 2):
        flags = ["--output_dir", str(tmp_path / str(workers)), "--workers", str(workers)]
        assert main(["convert", "jsonl", "--data_files", str(file), *flags]) == 0
    names = {f"train-{number:05d}.parquet" for number in range(5)} | {"report.txt", "skipped.jsonl"}
    assert files_in(tmp_path / "0").keys() == files_in(tmp_path / "2").keys() == names
    assert rows_in(tmp_path / "0") == rows_in(tmp_path / "2")
    assert skipped_in(tmp_path / "0") == skipped_in(tmp_path / "2")


def test_only_as_many_rows_are_read_as_are_asked_for(tmp_path):
    table = Dataset.from_list([{"id": f"q{n}", "problem": "p", "solution": "x" if n else None} for n in range(50)])

    def made(name, **chosen):
        rules = Rules(CONVERTERS["jsonl"], "rows.jsonl", **chosen)
        rows = convert_rows(table, rules, ["id"], tmp_path / name, workers=0)
        return [(row["id"], row["__row__"]) for row in rows]

    assert made("three", most=3) == [("q0", 0), ("q1", 1), ("q2", 2), ("q3", 3)]  # the first is left out
    assert made("two", ids=frozenset({"q7", "q9"})) == [("q7", 7), ("q9", 9)]
    with pytest.raises(DataError):
        made("none", ids=frozenset({"other"}))


def test_a_kill_leaves_the_earlier_result_or_the_new_one(tmp_path, monkeypatch):
    """Kill a conversion before each renaming and removal in turn; the next conversion cleans up."""
    monkeypatch.setattr("vgr_trl.data.convert.ROWS_PER_FILE", 20)
    old, new = [question(n) for n in range(60)], [question(n, problem="How many?") for n in range(50)]
    folder, seen = tmp_path / "out", set()
    for last in count():
        written(old, folder)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of a fork beside threads
            child = os.fork()
        if child == 0:
            left = iter(range(last))

            def count_down(event, arguments, left=left):
                if event in ("os.rename", "os.remove", "os.rmdir") and next(left, None) is None:
                    os._exit(9)

            sys.addaudithook(count_down)
            with suppress(Exception):
                written(new, folder)
                os._exit(0)
            os._exit(1)
        killed = os.waitpid(child, 0)[1] != 0
        rows = [row["problem"] for row in rows_in(folder)]
        seen.add((len(rows), *{*rows}))
        if not killed:
            break
    assert seen == {(60, "Which colour?"), (0,), (50, "How many?")}  # none between the two renamings


@pytest.mark.parametrize("name", ["mine.jsonl", "sub/train-00000.parquet", "train-00000-of-00001.parquet", None])
def test_rows_that_no_conversion_wrote_are_neither_replaced_nor_joined(tmp_path, name):
    """None: what looks like a conversion lacks its report."""
    written([question(1)], tmp_path)
    if name is None:
        (tmp_path / "report.txt").unlink()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError):
        written([question(1)], tmp_path)


def test_converted_rows_have_one_question_and_the_images_of_their_set():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "Which?"}]
    for row in ({"prompt": asked, "solution": "x"}, question(images=None)):
        with pytest.raises(DataError):
            to_schema(row, Rules(CONVERTERS["aokvqa"], "set"))
