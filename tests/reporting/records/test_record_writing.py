"""Records on disk: appended, bounded, and what happens where they cannot be written."""

import json
import os
from itertools import pairwise

import pytest
from support.made_records import completion, record

from vgr_trl.reporting.records import LogEntry, RecordedImage, RecordFiles, read_run, refuse_unwritable
from vgr_trl.utils import ConfigError, DiskFullError

BOUND = 10**7


def files(folder, max_bytes=BOUND, resumed=False, **description):
    return RecordFiles(folder, {"name": "a run", **description}, max_bytes, resumed)


def pictured(step, name, size=0):
    shown = completion(images=[RecordedImage(f"images/{name}", 8, 8)], text="x" * size)
    return record(step, "train", shown)


def image_name(number):
    return f"{number:040x}.webp"


def test_what_is_written_is_read(tmp_path):
    written = files(tmp_path, rewards=["accuracy"])
    written.add(pictured(0, image_name(1)), {f"images/{image_name(1)}": b"picture"})
    written.add(record(1), {})
    written.log(LogEntry(1, "train", 2.0, {"loss": 0.5}))
    run = read_run(tmp_path)
    assert list(run.records()) == [pictured(0, image_name(1)), record(1)]
    assert run.logs() == [LogEntry(1, "train", 2.0, {"loss": 0.5})]
    assert (run.name, run.rewards, run.description["version"]) == ("a run", ["accuracy"], 1)
    assert (run.folder / "images" / image_name(1)).read_bytes() == b"picture"
    assert [path.name for path in run.folder.glob("records-*")] == ["records-000001.jsonl"]
    assert not list(run.folder.rglob(".*"))


def test_a_continued_run_appends_behind_what_a_kill_has_left(tmp_path):
    first = files(tmp_path)
    first.add(record(0), {})
    first.log(LogEntry(0, "train", 1.0, {"loss": 1.0}))
    folder = tmp_path / "rollouts"
    with (folder / "records-000001.jsonl").open("a") as file:
        file.write('{"version":1,"step":1,"mo')
    with (folder / "logs.jsonl").open("a") as file:
        file.write('{"version":1,')
    created = json.loads((folder / "run.json").read_text())["created"]

    second = files(tmp_path, resumed=True)
    second.add(record(1), {})
    second.log(LogEntry(1, "train", 2.0, {"loss": 2.0}))
    run = read_run(tmp_path)
    assert [item.step for item in run.records()] == [0, 1]
    assert [entry.values["loss"] for entry in run.logs()] == [1.0, 2.0]
    assert run.description["created"] == created


def test_a_new_run_in_an_old_folder_moves_the_old_records_aside(tmp_path):
    for step in range(3):
        files(tmp_path).add(record(step), {})
    assert [item.step for item in read_run(tmp_path).records()] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts", "rollouts.1", "rollouts.2"]


def test_beyond_the_bound_the_oldest_records_but_the_first_go_with_their_pictures(tmp_path):
    # 16 files of 1,000 bytes: a record of about 900 bytes fills one; pictures of 100 bytes.
    written = files(tmp_path, max_bytes=16_000)
    for step in range(40):
        shared = image_name(0)
        thumbnails = {f"images/{image_name(step)}": b"x" * 100, f"images/{shared}": b"x" * 100}
        written.add(pictured(step, image_name(step), size=600), thumbnails)
    folder = tmp_path / "rollouts"
    size = sum(path.stat().st_size for path in [*folder.glob("records-*"), *(folder / "images").iterdir()])
    assert 12_000 < size <= 16_000
    steps = [step for step, _ in read_run(tmp_path).steps()]
    assert steps[0] == 0
    assert steps[1:] == list(range(steps[1], 40))
    kept = {path.name for path in (folder / "images").iterdir()}
    assert kept == {image_name(step) for step in steps}


def test_the_bound_counts_what_an_earlier_process_has_left(tmp_path):
    for step in range(30):
        written = files(tmp_path, max_bytes=16_000, resumed=step > 0)
        written.add(pictured(step, image_name(step), size=600), {f"images/{image_name(step)}": b"x" * 100})
    folder = tmp_path / "rollouts"
    assert sum(path.stat().st_size for path in folder.glob("records-*")) <= 16_000
    assert {path.name for path in (folder / "images").iterdir()} == {
        image_name(step) for step, _ in read_run(tmp_path).steps()
    }


def logged(folder, steps, max_bytes):
    """The steps of training and of evaluations that are there after a log of each, and the size of their file."""
    written = files(folder, max_bytes)
    for step in steps:
        written.log(LogEntry(step, "eval" if step % 10 == 0 else "train", 1.0, {"loss": step}))
    size = (folder / "rollouts/logs.jsonl").stat().st_size
    entries = read_run(folder).logs()
    assert [entry.values["loss"] for entry in entries] == [entry.step for entry in entries]
    assert not list((folder / "rollouts").glob(".*"))
    return [[entry.step for entry in entries if entry.mode == mode] for mode in ("train", "eval")], size


def test_beyond_the_bound_every_second_log_of_training_goes(tmp_path):
    """A line has 72 to 76 bytes; 50 have 3,750."""
    (train, evaluated), size = logged(tmp_path, range(1, 500), max_bytes=7500)
    assert 3750 < size <= 7500
    assert evaluated == list(range(10, 500, 10))
    assert train[0] == 1
    assert train[-1] == 499
    gaps = [later - earlier for earlier, later in pairwise(train)]
    assert gaps[-1] <= 2 < 10 < gaps[0], "the oldest are the sparsest"


def test_a_log_of_evaluations_alone_has_the_bound_too(tmp_path):
    (train, evaluated), size = logged(tmp_path, range(0, 5000, 10), max_bytes=7500)
    assert 3750 < size <= 7500
    assert train == []
    assert (evaluated[0], evaluated[-1]) == (0, 4990)


def test_a_log_that_is_continued_counts_what_is_there(tmp_path):
    for step in range(300):
        files(tmp_path, 7500, resumed=step > 0).log(LogEntry(step, "train", 1.0, {"loss": 0.5}))
    assert (tmp_path / "rollouts/logs.jsonl").stat().st_size <= 7500
    steps = [entry.step for entry in read_run(tmp_path).logs()]
    assert (steps[0], steps[-1]) == (0, 299)


def test_one_record_larger_than_the_bound_is_kept(tmp_path):
    written = files(tmp_path, max_bytes=1000)
    for step in range(4):
        written.add(record(step, "train", completion(text="x" * 2000)), {})
    assert [step for step, _ in read_run(tmp_path).steps()] == [0, 3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_after_a_full_disk_the_next_record_begins_a_new_file(tmp_path):
    written = files(tmp_path)
    folder = tmp_path / "rollouts"
    (folder / "records-000001.jsonl").symlink_to("/dev/full")
    written._current = folder / "records-000001.jsonl"
    written._sizes[written._current] = 0
    with pytest.raises(DiskFullError, match=r"Disk full while writing .*records-000001\.jsonl: free space there"):
        written.add(record(0), {})
    written.add(record(1), {})
    assert [step for step, _ in read_run_without_device(folder)] == [1]


def read_run_without_device(folder):
    (folder / "records-000001.jsonl").unlink()
    return read_run(folder).steps()


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    refuse_unwritable(tmp_path / "new" / "deep.md", "rollout_log_path")
    refuse_unwritable(file, "rollout_log_path")
    with pytest.raises(ConfigError, match=r"rollout_log_path is .*deep.md, but .*file cannot be written to"):
        refuse_unwritable(file / "deep.md", "rollout_log_path")
    with pytest.raises(ConfigError, match="cannot be written to: choose another place"):
        refuse_unwritable(tmp_path, "rollout_log_path")
