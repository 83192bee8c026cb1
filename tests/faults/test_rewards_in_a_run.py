"""Rewards that fail in the middle of a run: what is said, and that nothing is trained on them."""

import math
import time

import pytest
import torch

from vgr_trl.errors import ConfigError, RewardError


def hanging(completions, **kwargs):
    try:
        time.sleep(60)
    except Exception:
        return [0.0] * len(completions)
    return [1.0] * len(completions)


def raising(completions, **kwargs):
    raise ValueError("no such column")


def infinite(completions, **kwargs):
    return [math.inf] * len(completions)


def too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (hanging, RewardError, "The reward hanging has not returned within reward_timeout=0.3 seconds"),
        (raising, ValueError, "no such column"),
        (infinite, RewardError, "infinite"),
        (too_few, RewardError, "The reward too_few returned 7 rewards: return a list of one number per completion"),
    ],
)
def test_the_run_ends_with_the_name(reward, error, message, vision_trainer):
    trainer = vision_trainer([reward], max_steps=2, reward_timeout=0.3, compute_attention_metrics=False)
    began = time.monotonic()
    with pytest.raises(error, match=message):
        trainer.train()
    assert time.monotonic() - began < 30
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
