"""verl's synchronous trainer with signals: its own steps, on a store in memory in place of TransferQueue."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from memory_store import Store, configuration, nested, trainer
from tensordict import NonTensorStack
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from vgr_trl.integrations.verl.inside_verl import plugin as ours
from vgr_trl.utils import ConfigError

LENGTHS, PROMPT = (3, 2, 4, 1), 2


@pytest.fixture
def run(monkeypatch):
    store = Store([f"{prompt}_{session}_0" for prompt in "xy" for session in "01"])
    store.replace_transfer_queue(monkeypatch.setattr)
    generator = torch.Generator().manual_seed(0)
    whole = [PROMPT + length for length in LENGTHS]
    store["response_mask"] = nested([torch.ones(length, dtype=torch.long) for length in LENGTHS])
    store["rm_scores"] = nested([[0.0] * (length - 1) + [float(row % 2)] for row, length in enumerate(LENGTHS)])
    store["uid"] = NonTensorStack("x", "x", "y", "y")
    asked = []

    def compute_log_prob(batch):
        asked.append(dict(batch.extra_info))
        for name in ("log_probs", "entropy", "vgr_vision", "vgr_instruction"):
            store[name] = nested([torch.rand(length, generator=generator) + 0.1 for length in whole])
        return batch

    def make(**given):
        return trainer(configuration(**given), compute_log_prob=compute_log_prob)

    return make, store, asked


def test_what_was_measured_shapes_the_advantages(run):
    make, store, asked = run
    steps, metrics = make(token_weight_clip=[0.5, 2.0]), {}
    monitored = store.meta
    batch = steps._compute_old_log_prob(monitored, metrics)
    assert asked[0]["vgr"]["options"] == {"token_weights": True, "token_weights_clip": [0.5, 2.0]}
    assert (asked[0]["vgr"]["step"], asked[0]["vgr"]["special_token_ids"]) == (7, [0, 1])
    assert "vgr" not in monitored.extra_info
    assert store["vgr_vision"].offsets().diff().tolist() == list(LENGTHS)
    steps._compute_advantage(batch, metrics)
    found = store["advantages"].to_padded_tensor(0)
    mask = store["response_mask"].to_padded_tensor(0)
    plain, _ = compute_grpo_outcome_advantage(store["rm_scores"].to_padded_tensor(0), mask, np.array(list("xxyy")))
    assert torch.allclose(found.sum(1), plain.sum(1), atol=1e-4)  # weights have mean 1
    ratio = store["vgr_instruction"].to_padded_tensor(0) / store["vgr_vision"].to_padded_tensor(1)
    first = found[0, :3] / plain[0, :3]
    assert first.argsort().tolist() == ratio[0, :3].argsort(descending=True).tolist()
    assert metrics["vgr/token_weight_mean"] == pytest.approx(1)


def test_weights_of_a_reward_shape_the_advantages(run):
    make, store, _ = run
    steps = make(collect_attentions=True)
    store["old_log_probs"] = nested([torch.zeros(length) for length in LENGTHS])
    weights = [[1.0, 3.0, 2.0], [1.0, 1.0], None, [2.0]]
    fields = [{"reward_extra_info": {} if row is None else {"token_weights": row}} for row in weights]
    store["extra_fields"] = NonTensorStack.from_list(fields)
    with pytest.warns(UserWarning, match="padded with 1 or cut"):  # the third row has none
        steps._compute_advantage(store.meta, {})
    found = store["advantages"].to_padded_tensor(0)
    assert torch.allclose(found[0, :3] / found[0, 0], torch.tensor([1.0, 3.0, 2.0]))
    assert torch.allclose(found[2], found[2, 0].expand(4))


def test_validation_takes_no_means_of_token_weights(run):
    make, *_ = run
    rewards = {"reward": [1.0, 0.0], "token_weights": [[1.0, 2.0], [1.0]]}
    found = make()._val_metrics_update(["set"] * 2, ["x", "x"], rewards, [])
    assert found["val-core/set/reward/mean@2"] == 0.5
    assert "token_weights" in rewards
    assert not any("token_weights" in name for name in found)


def test_several_outputs_of_a_session_are_refused(run):
    make, store, _ = run
    store.meta.keys[3] = "y_0_1"
    with pytest.raises(ConfigError, match="several outputs of one session"):
        make(collect_attentions=True)._compute_advantage(store.meta, {})


def test_options_that_verl_cannot_follow():
    with pytest.raises(ConfigError, match="casts response_mask to bool"):
        ours.read_options(configuration(apply_to="mask"))
    bypassed = configuration()
    bypassed.algorithm.rollout_correction = {"bypass_mode": True}
    with pytest.raises(ConfigError, match="leaves out the pass that measures"):
        ours.read_options(bypassed)


def test_verl_registers_it_by_its_own_environment():
    """In a process that only imports verl."""
    code = (
        "import verl\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "engine = EngineRegistry.get_engine_cls('language_model', 'fsdp2')\n"
        "print(get_trainer_cls('vgr_sync').__name__, engine.__name__)\n"
    )
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": ours.__name__,
        "VERL_ENGINE_VENDOR": "vgr",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split()[-2:] == ["SignalTrainer", "SignalEngine"], result.stderr[-2000:]
