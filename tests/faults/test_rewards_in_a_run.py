"""Rewards that fail in the middle of a run: what is said, and that nothing is trained on them."""

import math
import threading

import pytest
import torch

from vgr_trl.rewards import accuracy_reward
from vgr_trl.rewards.answers import same_formula
from vgr_trl.utils import ConfigError, RewardError


def hanging(completions, **kwargs):
    try:
        threading.Event().wait(900)
    except Exception:
        return [0.0] * len(completions)
    pytest.fail("the reward was waited for")


def hanging_behind_formulas(completions, **kwargs):
    same_formula.cache_clear()
    accuracy_reward(["<answer>y^{2}+z</answer>"], ["z+y^{2}"])
    return hanging(completions)


def raising(completions, **kwargs):
    raise ValueError("no such column")


def infinite(completions, **kwargs):
    return [math.inf] * len(completions)


def too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


@pytest.mark.parametrize(
    ("reward", "limit", "error", "message"),
    [
        (hanging, 0.3, RewardError, "The reward hanging has not returned within reward_timeout=0.3 seconds"),
        (hanging_behind_formulas, 5, RewardError, "The reward hanging_behind_formulas has not returned within"),
        (raising, 900, ValueError, "no such column"),
        (infinite, 900, RewardError, "infinite"),
        (too_few, 900, RewardError, "The reward too_few returned 7 rewards: return a list of one number per"),
    ],
)
def test_the_run_ends_with_the_name(reward, limit, error, message, vision_trainer):
    trainer = vision_trainer([reward], max_steps=2, reward_timeout=limit, compute_attention_metrics=False)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_nan_is_not_applicable_and_trains_nothing(vision_trainer):
    def undefined(completions, **kwargs):
        return [math.nan] * len(completions)

    trainer = vision_trainer([undefined], max_steps=2, compute_attention_metrics=False)
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.log_history[0]["rewards/undefined/not_applicable"] == 1
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_a_limit_is_a_number_of_seconds(seconds, vision_trainer):
    with pytest.raises(ConfigError, match=f"reward_timeout is {seconds!r}"):
        vision_trainer(reward_timeout=seconds)
