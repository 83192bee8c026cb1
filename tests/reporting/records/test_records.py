"""Run folders as they are found: whole, half-written, run twice, large, or none at all."""

import json
import re
import tracemalloc

import pytest
from support.made_records import completion, record

from vgr_trl.reporting import records
from vgr_trl.reporting.records import LogEntry, encode_log, encode_record, read_run
from vgr_trl.utils import DataError


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "run" / "rollouts"
    found.mkdir(parents=True)
    return found


def write(folder, name, *lines):
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def test_records_come_in_the_order_of_steps_from_either_folder(folder):
    write(folder, "records-000001.jsonl", encode_record(record(10)), encode_record(record(10, "eval")))
    write(folder, "records-000002.jsonl", encode_record(record(20)))
    write(folder, "run.json", '{"version":1,"name":"a","rewards":["accuracy","vgr"]}')
    for given in (folder, folder.parent, str(folder.parent)):
        run = read_run(given)
        assert [(item.step, item.mode) for item in run.records()] == [(10, "eval"), (10, "train"), (20, "train")]
        assert [item.step for item in run.records("train")] == [10, 20]
        assert (run.name, run.rewards, run.damaged) == ("a", ["accuracy", "vgr"], 0)
    assert run.record(10, "eval") == record(10, "eval")
    assert run.record(11, "eval") is None


def test_of_a_step_that_was_run_twice_the_last_counts(folder):
    old, new = (record(3, "train", completion(text=text)) for text in ("old", "new"))
    write(folder, "records-000001.jsonl", encode_record(old), encode_record(record(4)))
    write(folder, "records-000002.jsonl", encode_record(new))
    run = read_run(folder)
    assert [item.completions[0].text for item in run.records()] == ["new", "red"]


def test_a_torn_last_line_is_passed_over_and_counted(folder):
    whole = encode_record(record(0))
    for cut in (1, len(whole) // 2, len(whole)):  # the last one lacks nothing but its end of line
        (folder / "records-000001.jsonl").write_text(f"{whole}\n{encode_record(record(1))[:cut]}", encoding="utf-8")
        run = read_run(folder)
        assert [item.step for item in run.records()] == [0]
        assert run.damaged == 1


def test_a_damaged_line_in_the_middle_costs_that_line_only(folder):
    broken = encode_record(record(1)).replace('"tokens"', '"takens"')
    lines = [encode_record(record(0)), "\0\0\0", broken, '{"version":"x"}', encode_record(record(2))]
    write(folder, "records-000001.jsonl", *lines)
    run = read_run(folder)
    assert [item.step for item in run.records()] == [0, 2]
    assert run.damaged == 3
    (folder / "records-000001.jsonl").write_bytes(b'{"version":1,"step":0,"mode":"train"\xff}\n')
    assert list(read_run(folder).records()) == []


def test_keys_in_another_order_are_read_too(folder):
    reordered = json.dumps(dict(reversed(json.loads(encode_record(record(5))).items())))
    write(folder, "records-000001.jsonl", reordered)
    assert [item.step for item in read_run(folder).records()] == [5]


def test_logs_of_a_step_are_one_entry_with_the_last_values(folder):
    entries = [
        LogEntry(1, "train", 1.0, {"loss": 0.5, "reward": 0.25}),
        LogEntry(2, "train", 2.0, {"loss": 0.125}),
        LogEntry(1, "train", 3.0, {"loss": 0.75, "train_runtime": 9.0}),
        LogEntry(1, "eval", 4.0, {"eval_loss": None}),
    ]
    write(folder, "logs.jsonl", *map(encode_log, entries), "torn {")
    run = read_run(folder)
    assert [(entry.step, entry.mode, entry.values) for entry in run.logs()] == [
        (1, "eval", {"eval_loss": None}),
        (1, "train", {"loss": 0.75, "reward": 0.25, "train_runtime": 9.0}),
        (2, "train", {"loss": 0.125}),
    ]
    assert run.damaged == 1
    assert list(run.records()) == []


@pytest.mark.parametrize("content", ["", '{"version":', "[]", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_a_half_written_description_is_as_none(folder, content):
    (folder / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    write(folder, "records-000001.jsonl", encode_record(record(0)))
    run = read_run(folder)
    assert (run.name, run.rewards, len(list(run.records()))) == ("run", [], 1)


@pytest.mark.parametrize("file", ["records-000001.jsonl", "logs.jsonl", "run.json"])
def test_a_later_version_is_refused(folder, file):
    write(folder, "records-000001.jsonl", encode_record(record(0)))
    write(folder, file, '{"version":2,"step":0,"mode":"train"}')
    with pytest.raises(DataError, match="version 2, but this release of vgr_trl reads versions up to 1"):
        read_run(folder).logs()


def test_folders_without_records_are_refused_with_a_sentence(tmp_path, folder):
    for given, message in (
        (tmp_path / "none", "none is no folder: give the output_dir of a run"),
        (tmp_path, "has no folder rollouts"),
        (folder, "has no records yet"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            read_run(given)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DataError, match="is no folder"):
        read_run(file)


def test_a_record_that_cannot_be_read_any_more_is_left_out(folder):
    write(folder, "records-000001.jsonl", encode_record(record(0)))
    run = read_run(folder)
    (folder / "records-000001.jsonl").unlink()  # the run goes on and keeps its bound
    assert list(run.records()) == []
    assert run.damaged == 1


def test_reading_takes_the_memory_of_one_record(folder):
    long = completion(text="x" * 200_000)
    with (folder / "records-000001.jsonl").open("w") as file:
        for step in range(100):
            file.write(encode_record(record(step, "train", long)) + "\n")
    tracemalloc.start()
    try:
        assert sum(len(item.completions) for item in read_run(folder).records()) == 100
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * 200_000 < (folder / "records-000001.jsonl").stat().st_size / 5


def test_a_line_without_end_does_not_fill_the_memory(folder, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 1000)
    (folder / "records-000001.jsonl").write_text(
        f"{encode_record(record(0))}\n{'x' * 5000}\n{encode_record(record(1))}\n", encoding="utf-8"
    )
    run = read_run(folder)
    assert [item.step for item in run.records()] == [0, 1]
    assert run.damaged == 1
