"""Rewards with the signatures of verl and EasyR1."""

import pytest

from vgr_trl.integrations.verl.inside_easyr1 import rewards as easyr1_rewards
from vgr_trl.integrations.verl.rewards import SCORES, compute_score
from vgr_trl.utils import RewardError

RIGHT = "<think>the sky</think><answer>B</answer>"


def test_score_of_verl():
    info = {"choices": ["red", "blue"], "response_length": 15}
    limits = {"max_completion_len": 20, "soft_punish_cache": 10}
    score = compute_score("set", RIGHT, "blue", info, format_weight=0.5, length_weight=0.2, **limits)
    assert score == {"accuracy": 1, "format": 1, "length": -0.5, "score": pytest.approx(1 + 0.5 - 0.1)}
    assert compute_score("set", "<answer>A</answer>", "B") == {"score": 0, "accuracy": 0, "format": 0}


def test_a_weight_that_is_misspelt():
    with pytest.raises(TypeError, match="formt_weight"):
        compute_score("set", RIGHT, "B", formt_weight=0.5)
    managed = compute_score("set", RIGHT, "B", reward_router_address="10.0.0.1", reward_model_tokenizer=None)
    assert managed["score"] == 1


def test_scores_of_easyr1():
    rows = [{"response": text, "response_length": 18, "ground_truth": "B"} for text in (RIGHT, "B?")]
    limits = {"length_weight": 1.0, "max_completion_len": 20, "soft_punish_cache": 4}
    first, second = easyr1_rewards.compute_score(rows, format_weight=1.0, **limits)
    assert first == {"overall": 1.5, "accuracy": 1, "format": 1, "length": -0.5}
    assert second["overall"] == -0.5
    assert easyr1_rewards.REWARD_TYPE == "batch"


def test_rewards_made_of_attention_read_what_was_measured():
    """VGR 1, 2, 3, 4: rewards 1, 0.8333, 0.1667, 0; among the right ones 1, 2, 4: 0.5, 0.1667, 0, -0.5."""
    info = {"group_vgr": [1.0, 2.0, 3.0, 4.0], "group_accuracy": [1.0, 1.0, 0.0, 1.0], "vgr": 2.0**0.5}
    found = [[SCORES[name]("set", "", "", info | {"group_index": row}) for row in range(4)] for name in
             ("vgr", "vgr_hard_negative")]  # fmt: skip
    assert found[0] == pytest.approx([1, 5 / 6, 1 / 6, 0])
    assert found[1] == pytest.approx([0.5, 1 / 6, 0, -0.5])
    assert SCORES["mdi"]("set", "", "", info) == pytest.approx(0)


@pytest.mark.parametrize(("name", "key"), [("vgr", "group_vgr"), ("mdi", "vgr"), ("length", "response_length")])
def test_what_is_missing_is_named(name, key):
    with pytest.raises(RewardError, match=f"needs '{key}' in extra_info, which has"):
        SCORES[name]("set", "text", "B", {"index": 3})
