"""The same rollout through `DAPOTrainer` and through EasyR1's actor and trainer: same advantages, same gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from actor_on_cpu import actor, data_of, replace_flash_attn, trainer
from same_as_trl import WANTED, check, expected_of
from tiny_rollout import CLIP, GROUP, LEARNING_RATE, SCORES, rollout, tiny_model
from verl.trainer import core_algos, ray_trainer


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return expected_of(tmp_path_factory.mktemp("trl"), WANTED)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("padding_free", [False, True])
def test_advantages_and_gradients(expected, group, padding_free, monkeypatch):
    replace_flash_attn(monkeypatch)
    with_epsilon_of_trl = partial(core_algos.compute_grpo_outcome_advantage, eps=1e-4)  # instead of 1e-6
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_MAP, "grpo_of_trl", with_epsilon_of_trl)
    model, processor = tiny_model()
    tensors, pixels = rollout(model, processor, len(SCORES) // GROUP)
    mask, made = tensors["response_mask"], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def keep(*_):
        named = model.named_parameters()
        made.append({name: each.grad.clone() for name, each in named if each.grad is not None})

    optimizer.register_step_pre_hook(keep)
    theirs = actor(
        model, optimizer, padding_free=padding_free, ppo_epochs=2, clip_ratio_low=CLIP[0], clip_ratio_high=CLIP[1]
    )
    tensors["old_log_probs"] = theirs.compute_log_prob(data_of(tensors, pixels, processor, WANTED))
    tensors["token_level_rewards"] = torch.zeros(mask.shape)
    tensors["token_level_rewards"][range(len(mask)), mask.sum(1) - 1] = torch.tensor(SCORES)
    data = data_of(tensors | dict(theirs.columns), pixels, processor, WANTED)
    data.non_tensor_batch["uid"] = np.array([f"prompt{row // GROUP}" for row in range(len(mask))], dtype=object)
    steps = trainer(preset="vgr_vppo", estimator="grpo_of_trl", **WANTED)
    data = steps.compute_advantages(ray_trainer.compute_advantage, data, "grpo")
    theirs.update_policy(data)
    found = {name: data.batch[name] for name in ("advantages", "old_log_probs")}
    check(found | {"gradients": made}, expected, mask)
