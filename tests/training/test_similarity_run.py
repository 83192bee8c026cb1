"""Similarity of hidden states to the image in a training run: logged, and given to rewards that declare it."""

import pytest
from support.trainers import logged

from vgr_trl.registries import declares
from vgr_trl.utils import ConfigError


@declares(needs=("similarity",))
def likeness(completions, similarity, **kwargs):
    """The mean similarity of each completion's tokens, spread so that groups differ."""
    return [100 * value for value in similarity]


def test_the_reward_gets_what_is_logged_with_prompts_shared_or_not(vision_trainer):
    found = {}
    for share in ("on", "off"):
        trainer = vision_trainer(likeness, max_steps=1, share_prompts=share, hidden_similarity_layer=1)
        trainer.train()
        (metric,) = logged(trainer, "signals/similarity")
        assert -1 < metric < 1
        found[share] = [metric, *(value / 100 for value in trainer._logs["rewards"]["likeness"])]
    assert len(set(found["on"])) > 3
    assert found["on"] == pytest.approx(found["off"], abs=1e-5)


def test_a_layer_that_the_model_has_not(vision_trainer):
    with pytest.raises(ConfigError, match="hidden_similarity_layer is 9, but the model has"):
        vision_trainer(likeness, hidden_similarity_layer=9)
