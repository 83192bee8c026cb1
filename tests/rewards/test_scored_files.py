"""Reward files in the form of EasyR1 and MTRL, written here after the forms that their loaders call."""

import os
import sys

import pytest

from vgr_trl.rewards import load_reward, load_rewards
from vgr_trl.rewards.reward_files import FileOptions
from vgr_trl.utils import RewardError

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
import os
REWARD_TYPE = "sequential"
def compute_score(reward_input, bonus=0):
    return {"overall": len(reward_input["response"]) + bonus, "process": os.getpid()}
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


def test_batch_form_gives_overall_and_logs_the_other_scores(written):
    """Right and tidy: 0.9 + 0.1; neither: 0. Half of the two are right, half tidy."""
    logged = {}
    reward = load_reward(f"{written(BATCH)}:compute_score")
    assert reward(**ROWS, log_metric=logged.__setitem__) == [1.0, 0.0]
    assert logged == {"reward/overall": 0.5, "reward/accuracy": 0.5, "reward/format": 0.5}
    assert reward.__name__ == "compute_score"


def test_a_second_score_is_a_reward_of_its_own_and_costs_no_second_call(written):
    file = written(BATCH)
    overall, accuracy = load_rewards([f"{file}:compute_score", f"{file}:compute_score[accuracy]"])
    assert (overall(**ROWS), accuracy(**ROWS)) == ([1.0, 0.0], [1.0, 0.0])
    assert sys.modules["theirs_of_test"].calls == [2]
    assert accuracy.__name__ == "accuracy"
    with pytest.raises(RewardError, match="returned no 'style', but overall, format, accuracy"):
        load_reward(f"{file}:compute_score[style]")(**ROWS)
    with pytest.raises(RewardError, match=r"asks for a score, but accuracy returns one number"):
        load_reward("accuracy[accuracy]")


def test_sequential_form_runs_in_processes_of_its_own(written):
    file = written(ONE_BY_ONE)
    options = FileOptions(processes=2, arguments={"bonus": 1})
    with pytest.raises(RewardError, match="reward_function_kwargs has 'weight', but compute_score accepts bonus"):
        load_reward(f"{file}:compute_score", files=FileOptions(arguments={"weight": 0.5}))
    overall, process = load_rewards([f"{file}:compute_score", f"{file}:compute_score[process]"], files=options)
    texts = [[{"role": "assistant", "content": "x" * length}] for length in range(9)]
    rows = {"completions": texts, "prompts": ["?"] * 9, "solution": [None] * 9}
    assert overall(**rows) == [length + 1 for length in range(9)]
    assert len({*process(**rows), os.getpid()}) > 1
    assert overall(**rows) == load_reward(f"{file}:compute_score", files=FileOptions(arguments={"bonus": 1}))(**rows)


def test_pairs_of_reward_and_metrics(written):
    """`4` once in `<a> 4` and not in `5`; three tokens and one."""
    text = (
        "def reward_function(data_dict):\n    overlap = data_dict['response'].count(data_dict.get('ground_truth', ''))"
    )
    text += "\n    return overlap + 0.5, {'length': data_dict['response_length']}"
    logged = {}
    assert load_reward(f"{written(text)}:reward_function")(**ROWS, log_metric=logged.__setitem__) == [1.5, 0.5]
    assert logged == {"reward/overall": 1.0, "reward/length": 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(reward_inputs):\n    return [{'overall': 1}]", "returned .* for a batch of 2 completions"),
        ("def score(reward_input):\n    return 'good'", "returned 'good' for a completion"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_the_name(written, text, message):
    with pytest.raises(RewardError, match=message):
        load_reward(f"{written(text)}:score")(**ROWS)
