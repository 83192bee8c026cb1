"""verl's FSDP engine on a CPU, and batches for it.

verl names no CPU among its platforms, so one is registered here: its device is "cpu", its backend gloo. With padding
removed, verl's attention of Qwen2.5-VL calls flash-attn, which needs CUDA: its function for packed sequences is
replaced by one of plain torch, in float32.
"""

import os
from pathlib import Path

os.environ.update(VERL_PLATFORM="cpu", VERL_DISABLE_FLASH_ATTN_CE="1", HF_HUB_OFFLINE="1")

import numpy as np
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = torch.cpu
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: torch.device("cpu"))
    empty_cache = staticmethod(lambda: None)
    communication_backend_name = staticmethod(lambda: "gloo")


from verl import DataProto  # these ask for the platform
from verl.models.transformers import qwen2_vl
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.utils.padding import left_right_2_no_padding

from vgr_trl.integrations.verl.inside_verl.plugin import SignalEngine


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


def build(folder: Path, packed: bool) -> SignalEngine:
    model_config = HFModelConfig(
        path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False, use_remove_padding=packed,
    )  # fmt: skip
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


def batch(tensors: dict, pixels: list, packed: bool, share: slice = slice(None), **more):
    rows = np.empty(len(pixels), dtype=object)
    rows[:] = pixels
    data = DataProto.from_single_dict({**tensors, "multi_modal_inputs": rows})[share]
    data = left_right_2_no_padding(data.to_tensordict())
    given = {"calculate_entropy": True, "temperature": 1.0, "compute_loss": False} | more
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=2, use_dynamic_bsz=False, use_remove_padding=packed, **given)
    return data


def gradients(engine: SignalEngine) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in engine.module.named_parameters() if parameter.grad is not None}
    return {name: getattr(grad, "full_tensor", grad.detach)().clone() for name, grad in found.items()}
