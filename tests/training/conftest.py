from functools import partial

import pytest


@pytest.fixture
def make(vision_trainer):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    return partial(vision_trainer, learning_rate=1e-2, compute_attention_metrics=False, **sizes)
