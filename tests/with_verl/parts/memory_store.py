"""A store in memory in place of verl's TransferQueue, and trainers of ours on it."""

from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from vgr_trl.integrations.verl.inside_verl import plugin as ours


class Store(dict):
    def __init__(self, keys):
        super().__init__()
        self.meta = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.update(dict(fields.items()))
        return self.meta

    def kv_batch_get(self, keys, partition_id, select_fields):
        found = {name: self[name] for name in select_fields if name in self}
        return TensorDict(found, batch_size=len(keys))

    def replace_transfer_queue(self, set_attribute=setattr):
        for module in (trainer_base, ours):
            set_attribute(module, "tq", self)


def nested(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def configuration(adv_estimator="vgr_token_weights", loss_mode="vanilla", **given):
    algorithm = {"adv_estimator": adv_estimator, "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0, "vgr": given}
    actor = {
        "policy_loss": {"loss_mode": loss_mode}, "loss_agg_mode": "token-mean", "loss_scale_factor": None,
        "ppo_mini_batch_size": 4, "calculate_entropy": False, "entropy_coeff": 0.0, "ppo_epochs": 2,
        "data_loader_seed": 42, "shuffle": False,
    }  # fmt: skip
    rollout = {"temperature": 1.0, "calculate_log_probs": False, "n": 2}
    return OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"actor": actor, "rollout": rollout}})


def trainer(config, step=7, processor=None, **workers):
    made = object.__new__(ours.SignalTrainer)
    made.config = config
    made.signal_options = ours.read_options(config)
    made.actor_rollout_wg = SimpleNamespace(**workers)
    made.processor, made.tokenizer = processor, SimpleNamespace(all_special_ids=[0, 1])
    made.global_steps = step
    return made
