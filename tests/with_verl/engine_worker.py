"""One process of verl's FSDP engine on a CPU; writes what a measured pass and a training step gave.

Usage: engine_worker.py FOLDER {padded,packed} OPTIONS

verl names no CPU among its platforms, so one is registered here: its device is "cpu", its backend gloo. With padding
removed, verl's attention of Qwen2.5-VL calls flash-attn, which needs CUDA: its function for packed sequences is
replaced by one of plain torch, in float32.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.update(VERL_PLATFORM="cpu", VERL_DISABLE_FLASH_ATTN_CE="1", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parent))

import cpu_platform  # noqa: F401, I001  registers itself before anything asks for the platform
import numpy as np
import torch
from tiny_rollout import GROUP, rollout, tiny_model
from torch import distributed
from verl import DataProto


from verl.models.transformers import qwen2_vl
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from vgr_trl.integrations.verl.inside_verl.engine import SignalEngine
from vgr_trl.integrations.verl.inside_verl.registered import register
from vgr_trl.integrations.verl.inside_verl.trl_release import hide_newer_trl
from vgr_trl.integrations.verl.perturbed import black_of
from vgr_trl.signals.modality import special_token_ids


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale=None, **kwargs):
    """As `flash_attn_varlen_func`: (tokens, heads, width), sequences behind each other."""
    assert causal
    parts = []
    for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        sides = (side[start:stop].transpose(0, 1) for side in (q, k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*sides, is_causal=True, scale=softmax_scale))
    return torch.cat(parts, dim=1).transpose(0, 1)


qwen2_vl.flash_attn_varlen_func = packed_attention
qwen2_vl._flash_supports_window_size = qwen2_vl._flash_supports_deterministic = False
qwen2_vl._flash_use_top_left_mask = False
qwen2_vl.fa_peft_integration_check = lambda query, key, value, **kwargs: (query, key, value)


def run(folder: Path, layout: str, options: dict, loss_mode: str = "vgr") -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    register()
    hide_newer_trl()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, processor = tiny_model()
    if rank == 0:
        model.save_pretrained(folder / "model")
    distributed.barrier()
    engine = build(folder / "model", packed=layout == "packed")
    tensors, pixels = rollout(model, processor, prompts=4)
    share = slice(rank * len(pixels) // world, (rank + 1) * len(pixels) // world)
    given = {
        "options": options,
        "step": 3,
        "special_token_ids": special_token_ids(processor),
        "black": black_of(processor),
    }
    own = batch(tensors, pixels, share, given)
    with engine.eval_mode():
        output = engine.infer_batch(own)
    found = {name: no_padding_2_padding(value, own) for name, value in output["model_output"].items()}
    result = {name: value.tolist() for name, value in found.items()}
    result["shared"] = None if getattr(engine, "sharing", None) is None else engine.sharing.prompts_per_row
    result["reasons"] = None if getattr(engine, "sharing", None) is None else dict(engine.sharing.plain)

    generator = torch.Generator().manual_seed(9)
    advantages = torch.randn(tensors["responses"].shape, generator=generator) * tensors["response_mask"]
    tensors["advantages"] = advantages
    tensors["old_log_probs"] = torch.zeros_like(advantages)
    tensors["old_log_probs"][share] = found["log_probs"]
    if world > 1:
        distributed.all_reduce(tensors["old_log_probs"])
    own = batch(tensors, pixels, share, given, global_batch_size=len(pixels))
    config = ActorConfig(
        strategy="fsdp2", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode), loss_agg_mode="token-mean",
    )  # fmt: skip
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(own, partial(ppo_loss, config=config), forward_only=False)
        gradients = {}
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                gradients[name] = whole.clone()
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    distributed.destroy_process_group()


def build(folder: Path, packed: bool) -> SignalEngine:
    model_config = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
        use_remove_padding=packed,
    )
    engine = SignalEngine(
        model_config,
        FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", use_dynamic_bsz=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=2),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def batch(tensors: dict, pixels: list, share: slice, given: dict, **more):
    rows = np.empty(len(pixels), dtype=object)
    rows[:] = pixels
    data = DataProto.from_single_dict({**tensors, "multi_modal_inputs": rows})[share].to_tensordict()
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data, vgr=given, calculate_entropy=True, temperature=1.0, micro_batch_size_per_gpu=2, use_dynamic_bsz=False,
        use_remove_padding=PACKED, compute_loss=False, **more,
    )  # fmt: skip
    return data


if __name__ == "__main__":
    PACKED = sys.argv[2] == "packed"
    run(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:])
