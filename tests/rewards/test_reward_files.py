"""Reward files in the form of EasyR1 and MTRL, written here after the forms that their loaders call."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.launching import SECONDS

from vgr_trl.errors import RewardError
from vgr_trl.rewards import load_reward, load_rewards
from vgr_trl.rewards.loading import FileOptions, collect_token_weights

BATCH = """
REWARD_NAME = "math"
REWARD_TYPE = "batch"
calls = []
def compute_score(reward_inputs, format_weight=0.1):
    calls.append(len(reward_inputs))
    scores = []
    for given in reward_inputs:
        assert set(given) == {"response", "response_length", "ground_truth", "prompt"}
        right, tidy = float(given["ground_truth"] in given["response"]), float(given["response"].startswith("<"))
        overall = (1 - format_weight) * right + format_weight * tidy
        scores.append({"overall": overall, "format": tidy, "accuracy": right})
    return scores
"""
ONE_BY_ONE = """
import os, time
def compute_score(reward_input, bonus=0):
    if reward_input["response"] == "hang":
        time.sleep(900)
    if reward_input["response"] == "end":
        os._exit(1)
    return {"overall": len(reward_input["response"]) + bonus, "process": os.getpid()}
"""
PAIRS = """
def reward_function(data_dict):
    overlap = data_dict["response"].count(data_dict["ground_truth"])
    return overlap + 0.5, {"length": data_dict["response_length"]}
"""
ROWS = {
    "completions": [[{"role": "assistant", "content": "<a> 4"}], [{"role": "assistant", "content": "5"}]],
    "completion_ids": [[1, 2, 3], [4]],
    "prompts": [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2 + 2"}]}]] * 2,
    "solution": ["4", "4"],
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="theirs_of_test.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_batch_form_logs_its_scores_and_a_second_one_is_a_reward_that_costs_no_call(written):
    """Right and tidy: 0.9 + 0.1; neither: 0. Half of the two are right, half tidy."""
    name, logged = f"{written(BATCH)}:compute_score", {}
    overall, accuracy = load_rewards([name, f"{name}[accuracy]"])
    assert overall(**ROWS, log_metric=logged.__setitem__) == accuracy(**ROWS) == [1.0, 0.0]
    assert logged == {"reward/overall": 0.5, "reward/accuracy": 0.5, "reward/format": 0.5}
    assert sys.modules["theirs_of_test"].calls == [2]
    assert (overall.__name__, accuracy.__name__) == ("compute_score", "accuracy")
    with pytest.raises(RewardError):
        load_reward(f"{name}[style]")(**ROWS)
    with pytest.raises(RewardError):
        load_reward("accuracy[accuracy]")


def test_a_stated_form_makes_any_function_a_reward_file_and_no_weights_are_none(written):
    text = "def compute_reward(batch):\n    return [1.0, 0.5], {'accuracy': [1, 0], 'token_weights': None}\n"
    (reward,) = load_rewards([f"{written(text)}:compute_reward"], files=FileOptions(form="batch"))
    assert reward(**ROWS) == [1.0, 0.5]
    assert collect_token_weights([reward]) == [None, None]


def test_sequential_form_runs_in_processes_of_its_own(written):
    file = written(ONE_BY_ONE)
    options = FileOptions(processes=2, arguments={"bonus": 1})
    with pytest.raises(RewardError):
        load_reward(f"{file}:compute_score", files=FileOptions(arguments={"weight": 0.5}))
    overall, process = load_rewards([f"{file}:compute_score", f"{file}:compute_score[process]"], files=options)
    texts = [[{"role": "assistant", "content": "x" * length}] for length in range(9)]
    rows = {"completions": texts, "prompts": ["?"] * 9, "solution": [None] * 9}
    assert overall(**rows) == [length + 1 for length in range(9)]
    assert len({*process(**rows), os.getpid()}) > 1
    assert overall(**rows) == load_reward(f"{file}:compute_score", files=FileOptions(arguments={"bonus": 1}))(**rows)
    with pytest.raises(RewardError, match="A process of compute_score ended unexpectedly"):
        overall(**rows | {"completions": ["end"] * 9})


def test_pairs_of_reward_and_metrics(written):
    """`4` once in `<a> 4` and not in `5`; three tokens and one."""
    logged = {}
    assert load_reward(f"{written(PAIRS)}:reward_function")(**ROWS, log_metric=logged.__setitem__) == [1.5, 0.5]
    assert logged == {"reward/overall": 1.0, "reward/length": 2.0}


PROGRAM = """
import json, signal, sys
from vgr_trl.rewards import load_rewards
from vgr_trl.rewards.calling import wrap_reward
from vgr_trl.rewards.loading import FileOptions

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
    while sys.argv[2] == "waits":
        sys.stdin.readline()
        print(json.dumps([int(each) for each in process(**score(*"hgfedcba"))]), flush=True)
    wrap_reward(overall, "overall", print, seconds=float(sys.argv[3]))(**score(sys.argv[2]))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "reward.py").write_text(ONE_BY_ONE)
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


def test_a_signal_to_all_processes_leaves_them_to_the_one_that_asks_and_they_end_when_it_is_killed(start):
    """The signal is a scheduler's, when the step at hand is still to be finished."""
    process = start("waits")
    workers = {*json.loads(process.stdout.readline())}
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    print("go on", file=process.stdin, flush=True)
    assert {*json.loads(process.stdout.readline())} <= workers
    assert all(map(runs, workers))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    end = time.monotonic() + SECONDS
    while any(map(runs, workers)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_that_hangs_is_reported_and_ends_with_its_processes_by_ctrl_c(start):
    process = start("hang", "0.2")
    workers = {*json.loads(process.stdout.readline())}
    assert "The reward overall has not returned" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT
    assert not any(map(runs, workers))
