import pytest
from datasets import Dataset
from support.made_sets import jsonl, picture, rows_in, skipped_in, written

from vgr_trl.cli.data import main
from vgr_trl.data.convert import Rules, convert_subset, statistics_in
from vgr_trl.data.counts import report
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.utils import ConfigError, DataError

CHOICES = ["red", "blue"]


def question(number: int = 0, **changed):
    fields = {"id": f"q{number}", "source": "made", "problem": "Which colour?", "solution": "A", "choices": CHOICES}
    return fields | {"images": [picture((number, 0, 0))]} | changed


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}


def test_nothing_left_is_an_error_and_may_be_corrected_in_the_same_folder(tmp_path):
    bad = [question(n, solution=text) for n, text in enumerate(("green", "teal", ""))]
    with pytest.raises(DataError, match="None of the 3 rows can be used; [23] because: solution is"):
        written(bad, tmp_path)
    assert len(skipped_in(tmp_path)) == 3
    written([bad[0], question(1)], tmp_path)
    assert [row["id"] for row in rows_in(tmp_path)] == ["q1"]
    (left,) = skipped_in(tmp_path)
    assert (left["row"], left["reason"][:19]) == (0, "solution is 'green'")


def test_two_processes_give_the_same_as_none(tmp_path):
    rows = [question(n, solution="A" if n % 7 else "green") for n in range(100)]
    file = jsonl(tmp_path / "rows.jsonl", [{**row, "images": None} for row in rows])
    for workers in (0, 2):
        flags = ["--output_dir", str(tmp_path / str(workers)), "--rows_per_file", "20", "--workers", str(workers)]
        assert main(["convert", "jsonl", "--data_files", str(file), *flags]) == 0
    assert files_in(tmp_path / "0").keys() == files_in(tmp_path / "2").keys()
    assert rows_in(tmp_path / "0") == rows_in(tmp_path / "2")
    assert skipped_in(tmp_path / "0") == skipped_in(tmp_path / "2")


def test_only_as_many_rows_are_read_as_are_asked_for(tmp_path):
    rows = [{"id": f"q{n}", "problem": "p", "solution": "x" if n else None} for n in range(50)]
    table = Dataset.from_list(rows)
    rules = Rules(CONVERTERS["jsonl"], "rows.jsonl")
    made = convert_subset(table, rules, tmp_path, 0, None, 3)
    assert [row["id"] for row in made if row["__reason__"] is None] == ["q1", "q2", "q3"]
    made = convert_subset(table, rules, tmp_path, 0, {"q7", "q9"}, None)
    assert [(row["id"], row["__row__"]) for row in made] == [("q7", 7), ("q9", 9)]
    with pytest.raises(DataError, match=r"None of the ids is in rows.jsonl"):
        convert_subset(table, rules, tmp_path, 0, {"other"}, None)


def test_after_a_kill_nothing_is_there_and_the_same_call_ends_the_same(tmp_path, monkeypatch):
    rows = [question(n, solution="green" if n % 7 == 3 else "A") for n in range(60)]
    written(rows, tmp_path / "plain", rows_per_file=20)

    def broken(path, *args):
        path.write_bytes(b"torn")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vgr_trl.data.convert._write", broken)
        with pytest.raises(KeyboardInterrupt):
            written(rows, tmp_path / "killed", rows_per_file=20)
    assert not files_in(tmp_path / "killed")
    (tmp_path / "killed" / ".train-00000.parquet.unfinished").write_bytes(b"torn")  # what a signal leaves
    written(rows, tmp_path / "killed", rows_per_file=20)
    plain, killed = (
        {name: data for name, data in files_in(tmp_path / folder).items() if not name.startswith(".")}
        for folder in ("plain", "killed")
    )
    assert plain == killed


def test_what_is_finished_is_not_made_again_unless_a_file_is_missing(tmp_path, monkeypatch):
    written([question(1)], tmp_path)
    first = statistics_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("support.made_sets.convert_rows", lambda *_: pytest.fail("made again"))
        written([question(1)], tmp_path)
    (tmp_path / "train-00000.parquet").unlink()
    written([question(1)], tmp_path)
    assert statistics_in(tmp_path) == first
    assert len(rows_in(tmp_path)) == 1


def test_a_folder_with_other_rows_is_refused(tmp_path):
    written([question(1)], tmp_path)
    with pytest.raises(ConfigError, match="holds a conversion with other set, seed: choose another folder"):
        written([question(1)], tmp_path, identity={"set": "a", "seed": 1})
    for name in ("mine.jsonl", "test-00000.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"has {name}, which no finished conversion made"):
            written([question(1)], tmp_path, split="validation")
        (tmp_path / name).unlink()


REPORTED = (
    ("rows by source", "3   75.0%  $5 set", "1   25.0%  other"),
    ("rows by number of choices", "3   75.0%  2", "1   25.0%  open"),
    ("multiple-choice rows by right letter", "2   66.7%  A", "1   33.3%  B"),
    ("commonest answers to open questions", "1  100.0%  B"),
    ("rows by number of images", "3   75.0%  1", "1   25.0%  2"),
    ("images by pixels of the shorter side", "2   40.0%  8 to 15", "3   60.0%  256 to 511"),
    ("left out", "2  100.0%  image file … does not exist"),
)


def test_the_report_by_hand(tmp_path):
    large, small = picture(size=(640, 480)), picture(size=(8, 20))
    rows = [question(number, source="$5 set", solution="AB"[number % 2], images=[large]) for number in range(3)]
    rows.append(question(3, source="other", choices=None, solution="B", images=[small] * 2))
    rows += [question(4, images=[{"bytes": None, "path": path}]) for path in ("/a/b.png", "/c/d.png")]
    written(rows, tmp_path / "set", columns=("images",))
    counts = statistics_in(tmp_path / "set")["train"]
    parts = [tuple(line.strip() for line in part.split("\n")) for part in report(counts).strip().split("\n\n")]
    assert parts == [*REPORTED]
