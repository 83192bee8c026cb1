"""verl's synchronous trainer with signals: its own steps, on a store in memory in place of TransferQueue."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1 import trainer_base

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.inside_verl import plugin
from vgr_trl.integrations.verl.inside_verl import trainer as ours

LENGTHS, PROMPT = (3, 2, 4, 1), 2


def configuration(estimator="vgr_token_weights", loss_mode="vanilla", **given):
    return OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": estimator,
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "vgr": given,
            },
            "actor_rollout_ref": {
                "actor": {
                    "policy_loss": {"loss_mode": loss_mode},
                    "loss_agg_mode": "token-mean",
                    "loss_scale_factor": None,
                },
                "rollout": {"temperature": 1.0, "calculate_log_probs": False, "n": 2},
            },
        }
    )


class Store(dict):
    """`kv_batch_put` and `kv_batch_get` of TransferQueue, for one partition."""

    def kv_batch_put(self, keys, partition_id, fields):
        self.update(dict(fields.items()))
        return self.meta

    def kv_batch_get(self, keys, partition_id, select_fields):
        found = {name: self[name] for name in select_fields if name in self}
        return TensorDict(found, batch_size=len(keys))


def nested(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def run(monkeypatch):
    store = Store()
    store.meta = KVBatchMeta(partition_id="train", keys=list("abcd"), tags=[{}] * 4)
    for module in (trainer_base, ours):
        monkeypatch.setattr(module, "tq", store)
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
        trainer = object.__new__(ours.SignalTrainer)
        trainer.config = configuration(**given)
        trainer.signal_options = ours.read_options(trainer.config)
        trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=compute_log_prob)
        trainer.processor, trainer.tokenizer = None, SimpleNamespace(all_special_ids=[0, 1])
        trainer.global_steps = 7
        return trainer

    return make, store, asked


def test_what_was_measured_shapes_the_advantages(run):
    make, store, asked = run
    trainer, metrics = make(token_weight_clip=[0.5, 2.0]), {}
    monitored = store.meta
    batch = trainer._compute_old_log_prob(monitored, metrics)
    assert asked[0]["vgr"]["options"] == {"token_weights": True, "token_weights_clip": [0.5, 2.0]}
    assert (asked[0]["vgr"]["step"], asked[0]["vgr"]["special_token_ids"]) == (7, [0, 1])
    assert "vgr" not in monitored.extra_info
    assert store["vgr_vision"].offsets().diff().tolist() == list(LENGTHS)
    trainer._compute_advantage(batch, metrics)
    found = store["advantages"].to_padded_tensor(0)
    mask = store["response_mask"].to_padded_tensor(0)
    plain, _ = compute_grpo_outcome_advantage(store["rm_scores"].to_padded_tensor(0), mask, np.array(list("xxyy")))
    assert torch.allclose(found.sum(1), plain.sum(1), atol=1e-4)  # weights have mean 1
    ratio = store["vgr_instruction"].to_padded_tensor(0) / store["vgr_vision"].to_padded_tensor(1)
    first = found[0, :3] / plain[0, :3]
    assert first.argsort().tolist() == ratio[0, :3].argsort(descending=True).tolist()
    assert metrics["vgr/token_weight_mean"] == pytest.approx(1)


def test_weights_of_a_reward_are_taken(run):
    make, store, _ = run
    trainer = make(collect_attentions=True)
    store["old_log_probs"] = nested([torch.zeros(length) for length in LENGTHS])
    weights = [[1.0, 3.0, 2.0], [1.0, 1.0], None, [2.0]]
    fields = [{"reward_extra_info": {} if row is None else {"token_weights": row}} for row in weights]
    store["extra_fields"] = NonTensorStack.from_list(fields)
    with pytest.warns(UserWarning, match="padded with 1 or cut"):  # the third row has none
        trainer._compute_advantage(store.meta, {})
    found = store["advantages"].to_padded_tensor(0)
    assert torch.allclose(found[0, :3] / found[0, 0], torch.tensor([1.0, 3.0, 2.0]))
    assert torch.allclose(found[2], found[2, 0].expand(4))


def test_what_is_refused():
    for config, sentence in (
        (configuration(apply_to="mask"), "casts response_mask to bool"),
        (configuration("grpo", token_weights=True), "adv_estimator is 'grpo'"),
        (configuration(blurred=1), "blurred is not known here"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ours.read_options(config)
    bypassed = configuration()
    bypassed.algorithm.rollout_correction = {"bypass_mode": True}
    with pytest.raises(ConfigError, match="leaves out the pass that measures"):
        ours.read_options(bypassed)


def test_verl_hangs_it_in_by_its_own_environment():
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
        "VERL_USE_EXTERNAL_MODULES": plugin.__name__,
        "VERL_ENGINE_VENDOR": "vgr",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split()[-2:] == ["SignalTrainer", "SignalEngine"], result.stderr[-2000:]
