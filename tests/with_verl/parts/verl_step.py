"""Two optimizer steps of verl's trainer and engine with ours in place, on the rollout of `tiny_rollout`.

Usage: verl_step.py FOLDER {padded,packed} OPTIONS

verl's steps are its own: old log-probabilities, advantages, loss. A store in memory stands for TransferQueue, each
process for its workers, of which it has a share of the rows. Gradient descent stands for its optimizers, which all have
state.
"""

import json
import sys
from functools import partial
from pathlib import Path

import engine_on_cpu
import torch
from memory_store import Store, configuration, nested, trainer
from tensordict import NonTensorStack
from tiny_rollout import CLIP, GROUP, LEARNING_RATE, SCORES, rollout, tiny_model
from torch import distributed
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from vgr_trl.integrations.verl.inside_verl import plugin  # noqa: F401  registers itself
from vgr_trl.patches.transformers import close_group_at_exit

# TRL adds 1e-4 to the standard deviation, verl 1e-6.
core_algos.ADV_ESTIMATOR_REGISTRY["grpo_of_trl"] = partial(core_algos.compute_grpo_outcome_advantage, epsilon=1e-4)


def run(folder: Path, packed: bool, options: dict) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    close_group_at_exit()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    share = slice(rank * len(SCORES) // world, (rank + 1) * len(SCORES) // world)
    model, processor = tiny_model()
    if rank == 0:
        model.save_pretrained(folder / "model")
    distributed.barrier()
    engine = engine_on_cpu.build(folder / "model", packed)
    tensors, pixels = rollout(model, processor, len(SCORES) // GROUP)
    lengths = tensors["response_mask"].sum(1).tolist()
    store = Store([f"prompt{row // GROUP}_{row % GROUP}_0" for row in range(len(SCORES))])
    store.replace_transfer_queue()
    store["response_mask"] = nested([torch.ones(length, dtype=torch.long) for length in lengths])
    store["rm_scores"] = nested([[0.0] * (length - 1) + [own] for length, own in zip(lengths, SCORES, strict=True)])
    store["uid"] = NonTensorStack(*[f"prompt{row // GROUP}" for row in range(len(SCORES))])
    made = []

    def compute_log_prob(batch):
        with engine.eval_mode():
            output = engine.infer_batch(engine_on_cpu.batch(tensors, pixels, packed, share, **batch.extra_info))
        parts = [{}] * world
        distributed.all_gather_object(parts, {name: value.unbind() for name, value in output["model_output"].items()})
        store.update({name: nested([row for part in parts for row in part[name]]) for name in parts[0]})
        return batch

    def update_actor(batch):
        own = {name: store[name].to_padded_tensor(0) for name in ("advantages", "old_log_probs")}
        given = {name: value for name, value in batch.extra_info.items() if name != "dataloader_kwargs"}
        data = engine_on_cpu.batch(tensors | own, pixels, packed, share, **given)
        with engine.train_mode():
            for _ in range(batch.extra_info["epochs"]):
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(data, partial(ppo_loss, config=actor), forward_only=False)
                made.append(engine_on_cpu.gradients(engine))
                for parameter in engine.module.parameters():
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad, alpha=LEARNING_RATE)
        return {"metrics": {"mfu": [0.0]}}

    config = configuration("vgr_vppo", "vgr_papo", estimator="grpo_of_trl", **options)
    actor = ActorConfig(
        strategy="fsdp2", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(loss_mode="vgr_papo"), loss_agg_mode="token-mean",
        clip_ratio_low=CLIP[0], clip_ratio_high=CLIP[1],
    )  # fmt: skip
    steps = trainer(config, 0, processor, compute_log_prob=compute_log_prob, update_actor=update_actor)
    batch, metrics = store.meta, {}
    for step in (steps._compute_old_log_prob, steps._compute_advantage, steps._update_actor):
        batch = step(batch, metrics)
    found = {name: store[name].to_padded_tensor(0) for name in ("advantages", "old_log_probs")}
    if rank == 0:
        torch.save(found | {"gradients": made}, folder / "steps.pt")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2] == "packed", json.loads(sys.argv[3]))
