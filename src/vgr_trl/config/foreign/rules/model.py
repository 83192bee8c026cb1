"""The model, its optimizer, and the engine that generates."""

import re
from importlib import util
from math import gcd
from typing import Any

from vgr_trl.config.foreign.rules.values import Set, Values
from vgr_trl.errors import ConfigError

_MODEL, _LORA = "worker.actor.model", "worker.actor.model.lora"
_TYPES = {None: "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(values: Values, set_: Set) -> None:
    """The checkpoint, the types that it is held and computed in, and its adapter."""
    path = values[f"{_MODEL}.model_path"]
    if path is None:
        raise ConfigError(f"{_MODEL}.model_path is missing: give a checkpoint folder or a hub name.")
    set_("model_name_or_path", path, f"{_MODEL}.model_path")
    if values[f"{_MODEL}.tokenizer_path"] not in (None, path):
        values.stop(f"{_MODEL}.tokenizer_path", "the processor is the one saved with the model")
    held, computed = "worker.actor.fsdp.torch_dtype", "worker.actor.fsdp.mp_param_dtype"
    set_("dtype", _TYPES[values.one_of(held, *_TYPES)], held)
    kind = values.one_of(computed, "bf16", "fp16", "fp32")
    set_("bf16", kind == "bf16", computed)
    set_("fp16", kind == "fp16", computed)
    _adapter(values, set_)


def _adapter(values: Values, set_: Set) -> None:
    kind = values.one_of(f"{_MODEL}.peft_type", None, "lora", "qlora")
    rank, excluded = values.whole(f"{_LORA}.rank", 0), values[f"{_LORA}.exclude_modules"]
    frozen = f"{_MODEL}.freeze_vision_tower"
    if kind is not None and rank == 0:
        raise ConfigError(f"{_MODEL}.peft_type is {kind}, but no rank is given: give {_MODEL}.lora_rank.")
    if rank == 0:
        if values[frozen]:
            values.stop(frozen, "only adapters leave the tower as it is")
        return
    if values[frozen] and not excluded:
        values.stop(frozen, "give lora.exclude_modules, which leaves the tower without adapters")
    set_("use_peft", True, f"{_LORA}.rank")
    set_("load_in_4bit", kind == "qlora", f"{_MODEL}.peft_type")
    set_("lora_r", rank, f"{_LORA}.rank")
    set_("lora_alpha", values[f"{_LORA}.alpha"], f"{_LORA}.alpha")
    set_("lora_dropout", float(values[f"{_LORA}.dropout"]), f"{_LORA}.dropout")
    targets = _names(values[f"{_LORA}.target_modules"])
    if excluded:  # one pattern for PEFT, which is told of exclusions by no option
        names = "|".join(map(re.escape, _LINEAR if targets == ["all-linear"] else targets))
        targets = [rf"(?!(?:{excluded})$)(?:.*\.)?(?:{names})"]
        set_("lora_target_modules", targets, f"{_LORA}.target_modules", f"{_LORA}.exclude_modules")
    else:
        set_("lora_target_modules", targets, f"{_LORA}.target_modules")


def _names(targets: Any) -> list[str]:
    texts = [targets] if isinstance(targets, str) else list(targets)
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def optimizer(values: Values, set_: Set) -> None:
    """AdamW's betas and the schedule of the learning rate."""
    first, second = values["worker.actor.optim.betas"]
    set_("adam_beta1", float(first), "worker.actor.optim.betas")
    set_("adam_beta2", float(second), "worker.actor.optim.betas")
    if values["worker.actor.optim.strategy"] != "adamw":
        why = "theirs makes up for the rounding of bfloat16 weights: give adamw, with fsdp.torch_dtype null for float32"
        values.refuse("worker.actor.optim.strategy", why)
    key, least = "worker.actor.optim.lr_scheduler_type", values["worker.actor.optim.min_lr_ratio"]
    kind = values.one_of(key, "constant", "constant_with_warmup", "cosine")
    if kind != "cosine":
        set_("lr_scheduler_type", "constant_with_warmup", key)
    elif not least:
        set_("lr_scheduler_type", "cosine", key)
    else:
        set_("lr_scheduler_type", "cosine_with_min_lr", key)
        set_("lr_scheduler_kwargs", {"min_lr_rate": float(least)}, "worker.actor.optim.min_lr_ratio")


def rollout(values: Values, set_: Set) -> None:
    """Generation by vLLM beside the training, as theirs; no ratio of its probabilities to the policy's is taken."""
    key, parallel = "worker.rollout.name", "worker.rollout.tensor_parallel_size"
    engine = values.one_of(key, "vllm", "hf")
    if key not in values.stated and util.find_spec("vllm") is None:
        engine = "hf"
    set_("use_vllm", engine == "vllm", key)
    if engine == "vllm":
        set_("vllm_mode", "colocate", key)
        set_("vllm_enable_sleep_mode", True)
        set_("vllm_importance_sampling_correction", False)
        size = values.whole(parallel)
        set_("vllm_tensor_parallel_size", size if parallel in values.stated else gcd(size, values.processes), parallel)
    set_("top_k", max(0, values["worker.rollout.top_k"]), "worker.rollout.top_k")
