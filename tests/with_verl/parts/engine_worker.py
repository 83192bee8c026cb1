"""One process of verl's FSDP engine on a CPU; writes what a measured pass and a training step gave.

Usage: engine_worker.py FOLDER {padded,packed} OPTIONS
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from engine_on_cpu import batch, build, gradients
from tiny_rollout import GROUP, STEP, rollout, tiny_model
from torch import distributed
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.integrations.verl.inside_verl import plugin  # noqa: F401  registers itself
from vgr_trl.integrations.verl.signals import build_actor_context
from vgr_trl.patches.distributed import close_group_at_exit


def run(folder: Path, packed: bool, options: dict) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    close_group_at_exit()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, processor = tiny_model()
    tensors, pixels = rollout(model, processor, prompts=4)
    if rank == 0:
        model.save_pretrained(folder / "model")
    distributed.barrier()
    engine = build(folder / "model", packed)
    share = slice(rank * len(pixels) // world, (rank + 1) * len(pixels) // world)
    context = build_actor_context(SignalOptions.read(options), STEP, processor)
    own = batch(tensors, pixels, packed, share, vgr=context)
    with engine.eval_mode():
        output = engine.infer_batch(own)
    found = {name: no_padding_2_padding(value, own) for name, value in output["model_output"].items()}
    torch.save(found | {"response_mask": tensors["response_mask"][share]}, folder / f"rank{rank}.pt")

    mask = tensors["response_mask"]
    tensors["advantages"] = torch.randn(mask.shape, generator=torch.Generator().manual_seed(9)) * mask
    tensors["old_log_probs"] = torch.zeros(mask.shape)
    tensors["old_log_probs"][share] = found["log_probs"]
    if world > 1:
        distributed.all_reduce(tensors["old_log_probs"])
    own = batch(tensors, pixels, packed, share, vgr=context, global_batch_size=len(pixels))
    config = ActorConfig(
        strategy="fsdp2", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(loss_mode="vgr"), loss_agg_mode="token-mean",
    )  # fmt: skip
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(own, partial(ppo_loss, config=config), forward_only=False)
        made = gradients(engine)
    if rank == 0:
        torch.save(made, folder / "gradients.pt")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2] == "packed", json.loads(sys.argv[3]))
