"""Rewards that fail in the middle of a run: what is said, and that nothing is trained on them."""

import math

import pytest

from vgr_trl.utils import RewardError


@pytest.mark.parametrize(
    ("rewards", "error"), [(lambda: [math.inf] * 8, RewardError), (lambda: 1 / 0, ZeroDivisionError)]
)
def test_the_run_ends_with_the_name(rewards, error, vision_trainer):
    def failing(completions, **kwargs):
        return rewards()

    trainer = vision_trainer([failing], max_steps=2, compute_attention_metrics=False)
    with pytest.raises(error, match="is inf for row 0|division"):
        trainer.train()
    assert trainer.state.global_step == 0
