"""A sequential reward file in processes of its own: what ends them."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.launching import SECONDS

REWARD = """
import os, time
def compute_score(reward_input):
    if reward_input["response"] == "hang":
        time.sleep(900)
    if reward_input["response"] == "end":
        os._exit(1)
    return {"overall": 1.0, "process": os.getpid()}
"""
PROGRAM = """
import json, signal, sys
from vgr_trl.rewards import load_rewards
from vgr_trl.rewards.loading import wrap_reward
from vgr_trl.rewards.reward_files import FileOptions

def score(*texts):
    rows = [[{"role": "assistant", "content": text}] for text in texts]
    return {"completions": rows, "prompts": ["?"] * len(rows), "solution": [None] * len(rows)}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    options = FileOptions(processes=2)
    name = sys.argv[1] + ":compute_score"
    overall, process = load_rewards([name, name + "[process]"], files=options)
    answered = set()
    while len(answered) < 2:  # a process that is slow to start leaves all rows to the other
        answered |= {int(each) for each in process(**score(*"abcdefgh"))}
    print(json.dumps([*answered]), flush=True)
    if sys.argv[2] == "waits":
        sys.stdin.readline()
        print(json.dumps([int(each) for each in process(**score(*"hgfedcba"))]), flush=True)
        sys.exit()
    wrap_reward(overall, "overall", print, seconds=float(sys.argv[3]))(**score(sys.argv[2]))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "reward.py")]

    def started(*given):
        return subprocess.Popen(
            [*command, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return started


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_they_end_when_the_process_that_asks_them_is_killed(start):
    process = start("waits")
    workers = {*json.loads(process.stdout.readline())}
    assert all(map(runs, workers))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    end = time.monotonic() + SECONDS
    while any(map(runs, workers)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_to_all_processes_leaves_them_to_the_one_that_asks(start):
    """As of a scheduler, when the step at hand is still to be finished."""
    process = start("waits")
    workers = {*json.loads(process.stdout.readline())}
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    said, errors = process.communicate("go on\n", timeout=SECONDS)
    assert process.returncode == 0, errors
    assert {*json.loads(said)} <= workers


def test_a_run_whose_process_ends_there_ends(start):
    process = start("end", "900")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "RewardError: A process of compute_score ended unexpectedly" in errors


def test_one_that_hangs_is_reported_and_ends_with_its_processes_by_ctrl_c(start):
    process = start("hang", "0.2")
    workers = {*json.loads(process.stdout.readline())}
    assert "The reward overall has not returned" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT
    assert not any(map(runs, workers))
