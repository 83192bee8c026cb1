"""Jobs in a thread: their order, their failures, and that none is lost at the end."""

import subprocess
import sys
import threading
from functools import partial

import pytest
from transformers.utils import logging

from vgr_trl.reporting.recorder import Background
from vgr_trl.utils import DiskFullError


@pytest.fixture
def warnings(monkeypatch):
    seen = []
    monkeypatch.setattr(logging.get_logger("vgr_trl.reporting.recorder"), "warning", seen.append)
    return seen


def test_jobs_run_in_order_and_none_is_lost_at_close():
    done = []
    background = Background("Records")
    for number in range(50):
        background.put(lambda number=number: done.append(number))
    background.close()
    assert done == list(range(50))
    background.put(lambda: done.append("after"))
    background.flush()
    assert done[-1] == "after"
    background.close()
    background.close()


def test_a_failing_job_is_warned_of_once_counted_at_the_end_and_the_others_run(warnings):
    done = []

    def fail():
        raise KeyError("no such thing")

    background = Background("Records")
    for job in (fail, lambda: done.append(1), fail, lambda: done.append(2)):
        background.put(job)
    background.close()
    assert done == [1, 2]
    assert len(warnings) == 2
    assert "Records cannot be written (KeyError: 'no such thing'); training goes on without this one" in warnings[0]
    assert warnings[1] == "Records: 2 of what was to be written is lost; the warnings before say why."


def test_what_a_full_disk_refuses_is_written_in_order_once_there_is_space(warnings):
    full, done = threading.Event(), []
    full.set()

    def write(number):
        if full.is_set():
            raise DiskFullError("Disk full while writing run/records.jsonl: free space there")
        done.append(number)

    background = Background("Records")
    for number in range(3):
        background.put(partial(write, number))
    background.flush()  # does not wait for space
    assert done == []
    assert len(warnings) == 1
    assert warnings[0].startswith("Records cannot be written (Disk full while writing run/records.jsonl: free space")
    full.clear()
    background.put(partial(write, 3))
    background.close()
    assert (done, len(warnings)) == ([0, 1, 2, 3], 1)


def test_of_what_a_disk_refuses_the_oldest_is_lost_and_the_end_says_how_many(warnings):
    tried = []

    def refused(number):
        tried.append(number)
        raise OSError(28, "No space left on device")

    background = Background("Records", most_waiting=2)
    for number in range(5):
        background.put(partial(refused, number))
        background.flush()
    background.close()
    # The third makes three that wait, so the first is left out, and so on.
    assert [number for number in range(5) if number in tried] == [0, 1, 2, 3]
    assert warnings[-1] == "Records: 5 of what was to be written is lost; the warnings before say why."
    assert len(warnings) == 2


def test_jobs_that_come_too_fast_are_left_out_and_training_never_waits(warnings):
    started, go_on, done = threading.Event(), threading.Event(), []

    def slow():
        started.set()
        go_on.wait(900)

    background = Background("Records", most_waiting=2, patience=0.05)
    background.put(slow)
    assert started.wait(900)
    for number in range(5):
        background.put(lambda number=number: done.append(number))
    background.flush()  # a disk that does not answer: gives up after its patience
    assert (background.left_out, len(warnings), done) == (3, 1, [])
    assert "faster than they can be written" in warnings[0]
    go_on.set()
    background.patience = 900
    background.close()
    assert done == [0, 1]


def test_what_waits_is_written_after_an_exception_of_the_program(tmp_path):
    file = tmp_path / "written"
    program = (
        "import time\n"
        "from pathlib import Path\n"
        "from vgr_trl.reporting.recorder import Background\n"
        "background = Background('Records')\n"
        f"background.put(lambda: (time.sleep(0.3), Path({str(file)!r}).write_text('whole')))\n"
        "raise RuntimeError('training has failed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 1
    assert "training has failed" in ended.stderr
    assert file.read_text() == "whole"
