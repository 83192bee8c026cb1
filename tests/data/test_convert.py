import pytest
from support.made_sets import picture, rows_in, skipped_in, written

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.convert import ROWS_PER_TASK, TASKS_PER_WORKER, Output, convert, encode_candidates, report
from vgr_trl.utils import ConfigError, DataError

CHOICES = ["red", "blue"]
BAD = {"bytes": b"no image", "path": None}


def question(number: int = 0, **changed) -> Question:
    fields = {"id": f"q{number}", "source": "made", "problem": "Which colour?", "solution": "A", "choices": CHOICES}
    return Question(**({**fields, "images": [picture((number, 0, 0))]} | changed))


def given(*found):
    return [(Origin("file", row), item) for row, item in enumerate(found)]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}


def test_nothing_left_is_an_error_and_may_be_corrected_in_the_same_folder(tmp_path):
    found = ["its answer is 3", "its answer is 4", "it has no image"]
    with pytest.raises(DataError, match="None of the 3 rows can be used; 2 because: its answer is …"):
        convert(given(*found), Output(tmp_path, workers=0), {"answer_key": "label"})
    assert len(skipped_in(tmp_path)) == 3
    convert(given("its answer is 3", question(1)), Output(tmp_path, workers=0), {"answer_key": "answer"})
    assert [row["id"] for row in rows_in(tmp_path)] == ["q1"]
    assert [row["reason"] for row in skipped_in(tmp_path)] == ["its answer is 3"]


def test_two_processes_give_the_same_as_none_and_hold_few_rows(tmp_path):
    read = []

    def rows():
        for number in range(100):
            read.append(number)
            found = {0: "it is bad", 1: question(images=[BAD])}.get(number % 7, question(number))
            yield Origin("f", number), found

    for workers in (0, 2):
        convert(rows(), Output(tmp_path / str(workers), rows_per_file=20, workers=workers), {})
    assert files_in(tmp_path / "0").keys() == files_in(tmp_path / "2").keys()
    assert rows_in(tmp_path / "0") == rows_in(tmp_path / "2")
    assert skipped_in(tmp_path / "0") == skipped_in(tmp_path / "2")
    read.clear()
    ahead = [len(read) - origin.row for origin, _ in encode_candidates(rows(), Output(tmp_path, workers=1))]
    assert max(ahead) <= ROWS_PER_TASK * TASKS_PER_WORKER


def test_after_a_kill_nothing_is_there_and_the_same_call_ends_the_same(tmp_path):
    rows = given(*("bad" if number % 7 == 3 else question(number) for number in range(60)))
    plain, killed = (Output(tmp_path / name, rows_per_file=20, workers=0) for name in ("plain", "killed"))
    convert(rows, plain, {})

    def broken():
        yield from rows[:50]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(broken(), killed, {})
    assert not files_in(killed.folder)
    (killed.folder / ".train-00000.parquet.unfinished").write_bytes(b"torn")  # what a signal leaves
    assert convert(rows, killed, {}) == convert(rows, plain, {})
    shown = {name: data for name, data in files_in(killed.folder).items() if not name.startswith(".")}
    assert shown == {name: data for name, data in files_in(plain.folder).items() if not name.startswith(".")}


def test_what_is_finished_is_not_made_again_unless_a_file_is_missing(tmp_path):
    first = written(given(question(1)), tmp_path)
    assert written(iter(lambda: pytest.fail("read again"), None), tmp_path) == first
    (tmp_path / "train-00000.parquet").unlink()
    assert written(given(question(1)), tmp_path) == first
    assert len(rows_in(tmp_path)) == 1


def test_a_folder_with_other_rows_is_refused(tmp_path):
    written(given(question(1)), tmp_path)
    with pytest.raises(ConfigError, match="holds a conversion with other set, seed: choose another folder"):
        convert(given(question(1)), Output(tmp_path, workers=0), {"set": "a", "seed": 1})
    for name in ("mine.jsonl", "test-00000.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"has {name}, which no finished conversion made"):
            written(given(question(1)), tmp_path, split="validation")
        (tmp_path / name).unlink()


REPORTED = (
    ("rows by source", "3   75.0%  $5 set", "1   25.0%  other"),
    ("rows by number of choices", "3   75.0%  2", "1   25.0%  open"),
    ("multiple-choice rows by right letter", "2   66.7%  A", "1   33.3%  B"),
    ("commonest answers to open questions", "1  100.0%  B"),
    ("rows by number of images", "3   75.0%  1", "1   25.0%  2"),
    ("images by pixels of the shorter side", "2   40.0%  8 to 15", "3   60.0%  256 to 511"),
    ("left out", "2   66.7%  image file … does not exist", "1   33.3%  it has no image"),
)


def test_the_report_by_hand(tmp_path):
    large, small = picture(size=(640, 480)), picture(size=(8, 20))
    rows = [question(number, source="$5 set", solution="AB"[number % 2], images=[large]) for number in range(3)]
    rows.append(question(3, source="other", choices=None, solution="B", images=[small] * 2))
    reasons = "image file /a/b.png does not exist", "image file /c/d.png does not exist", "it has no image"
    counts = written(given(*rows, *reasons), tmp_path / "set", columns=("images",))
    parts = [tuple(line.strip() for line in part.split("\n")) for part in report(counts).strip().split("\n\n")]
    assert parts == [*REPORTED]
