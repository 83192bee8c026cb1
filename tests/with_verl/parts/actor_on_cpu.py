"""EasyR1's actor with signals on a CPU, batches for it, and its modules that import what a CPU lacks."""

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import numpy as np
import torch
from einops import rearrange
from omegaconf import OmegaConf
from tiny_rollout import STEP
from verl.protocol import DataProto
from verl.workers.actor import dp_actor
from verl.workers.actor.config import ActorConfig

MISSING = "vllm vllm.distributed vllm.lora.models vllm.lora.request vllm.lora.utils vllm.lora.worker_manager"
MISSING += " qwen_vl_utils.vision_process msgspec wandb"
for name in MISSING.split():  # vLLM and what comes with it: nothing of them is called
    sys.modules[name] = MagicMock(name=name, __spec__=ModuleSpec(name, None))

from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.integrations.verl.inside_easyr1 import actor as hooks
from vgr_trl.integrations.verl.inside_easyr1.actor import SignalActor
from vgr_trl.integrations.verl.signals import build_actor_context


def trainer(estimator="grpo", **given):
    made = object.__new__(hooks.SignalTrainer)
    made.preset, made.options = hooks.read_options(given, estimator)
    made.config = OmegaConf.create({"algorithm": {"online_filtering": False}})
    made._weights, made._metrics = None, {}
    return made


def replace_flash_attn(monkeypatch):
    def unpad_input(hidden, mask):
        indices = mask.flatten().nonzero().flatten()
        return hidden.flatten(0, 1)[indices], indices, None, None

    def pad_input(hidden_states, indices, batch, seqlen):
        full = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
        return full.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])

    for name, function in (
        ("unpad_input", unpad_input),
        ("pad_input", pad_input),
        ("index_first_axis", lambda values, indices: values[indices]),
        ("rearrange", rearrange),
    ):
        monkeypatch.setattr(dp_actor, name, function, raising=False)


def actor(model, optimizer=None, **changed):
    config = ActorConfig(
        use_torch_compile=False, padding_free=False, micro_batch_size_per_device_for_experience=2,
        micro_batch_size_per_device_for_update=2, dynamic_batching=False, max_grad_norm=1e9,
    )  # fmt: skip
    config.global_batch_size_per_device = 8
    for name, value in changed.items():
        setattr(config, name, value)
    return SignalActor(config, model, optimizer or torch.optim.SGD(model.parameters(), lr=1.0))


def data_of(tensors, pixels, processor, options):
    rows = np.empty(len(pixels), dtype=object)
    rows[:] = pixels
    data = DataProto.from_single_dict({**tensors, "multi_modal_inputs": rows})
    context = build_actor_context(SignalOptions.read(options), STEP, processor)
    data.meta_info.update(temperature=1.0, vgr=context)
    return data
