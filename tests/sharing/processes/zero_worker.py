"""One of two processes over gloo: gradients of ZeRO-2 and ZeRO-3 with shared prompts against those without."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from process_worker import all_agree, difference_with_images_once
from support.models.compare import checkpointed, largest_relative, loss_of, with_head
from support.models.families import build, make_batch, with_frozen_tower

from vgr_trl.patches import close_group_at_exit
from vgr_trl.sharing import share_prompts


def engine_for(stage: int, checkpointing: bool, prepare=lambda model: model):
    model = with_head(prepare(build("qwen2_5_vl"))).train()
    if checkpointing:
        checkpointed(model)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def gradients(engine, batch):
    engine.backward(loss_of(engine, batch))
    whole = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: value.clone() for name, value in whole.items() if value is not None}


def run() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    close_group_at_exit()
    rank = dist.get_rank()
    batch = make_batch("qwen2_5_vl", seed=rank)
    for stage in (2, 3):
        for checkpointing in (False, True):
            plain = gradients(engine_for(stage, checkpointing), batch)
            engine = engine_for(stage, checkpointing)
            with share_prompts(engine, batch.completion_length, agree=all_agree) as report:
                shared = gradients(engine, batch)
            assert report.prompts_per_row == 1 / 3, report
            assert len(plain) > 10
            difference = largest_relative(plain, shared)
            assert difference < 1e-5, (stage, checkpointing, difference)
    difference = difference_with_images_once(rank, engine_for(2, True, with_frozen_tower), batch, gradients)
    assert difference < 1e-5, difference


if __name__ == "__main__":
    run()
