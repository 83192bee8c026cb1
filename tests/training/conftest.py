from copy import copy
from functools import partial

import pytest

from vgr_trl.views.perturbed_pass import score_perturbed


@pytest.fixture
def make(vision_trainer):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    return partial(vision_trainer, learning_rate=1e-2, compute_attention_metrics=False, **sizes)


@pytest.fixture
def rollouts(monkeypatch):
    """Each training rollout as it is when its views have been scored."""
    seen = []

    def measured(run, rollout):
        score_perturbed(run, rollout)
        seen.append(copy(rollout))

    monkeypatch.setattr("vgr_trl.trainer.score_perturbed", measured)
    return seen
