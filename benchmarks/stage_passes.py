"""What the benchmarks of steps, recipes and GPUs compare: scoring one batch, and steps of one rollout."""

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from peft import LoraConfig, get_peft_model
from sharing_models import MODEL_SHAPES, ModelShape, Size, build_model, make_batch, make_processor, make_question
from sharing_passes import now
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.rewards import vgr_reward
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, build_modality_masks

Run = Callable[[], float]  # -> seconds
# Memory that is freed stays with the process: else a third of a step on a CPU is page faults, and varies.
TIMING_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
LORA = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
STEPS: dict[str, dict[str, Any]] = {
    "trl": {},
    "ours": {"compute_attention_metrics": False},
    "vgr": {"token_weights": True},
    "perception": {
        "compute_attention_metrics": True,
        "enable_perception_filtering": True,
        "enable_trajectory_reweighting": True,
        "use_entropy_penalty": True,
    },
}


@dataclass(frozen=True)
class Setting:
    """What stays the same over sizes."""

    shape: str = "square"
    hidden: int = 512
    layers: int = 8
    vocabulary: int = 32768
    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "sdpa"
    checkpointing: bool = False
    threads: int = 1
    lora: bool = False
    optim: str = "sgd"
    one_model: bool = False  # all steps train the same weights, where copies would not fit

    @property
    def model_shape(self) -> ModelShape:
        """Widths and depths of the model."""
        if self.shape != "square":
            return MODEL_SHAPES[self.shape]
        return replace(ModelShape.square(self.hidden, self.layers), vocabulary=self.vocabulary)


def make_runs(setting: Setting, size: Size, names: Sequence[str], kind: str) -> dict[str, Run]:
    """One function per name, all on the same random weights; kind is `scoring` or `step`."""
    torch.set_num_threads(setting.threads)
    processor = make_processor(setting.model_shape.patch)
    model = build_model(
        setting.model_shape,
        processor.tokenizer,
        device=setting.device,
        dtype=setting.dtype,
        attention=setting.attention,
    )
    if setting.lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LORA))
    if kind == "step":
        return {name: _step(setting, size, model, processor, name) for name in names}
    return {name: _scoring(setting, size, model, processor, name) for name in names}


def _scoring(setting: Setting, size: Size, model: Any, processor: Any, name: str) -> Run:
    """A scoring pass as TRL makes it, with log-probabilities and entropies of G completions."""
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype, "patch": setting.model_shape.patch}
    batch = make_batch(size, processor.tokenizer, prompts=1, **options)
    ids = batch["input_ids"]
    masks = build_modality_masks(
        ids[:, : size.prompt],
        batch["attention_mask"][:, : size.prompt],
        vision_token_ids=[model.config.image_token_id],
        special_token_ids=[],
    )
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    labels = ids.clone()
    labels[:, : -size.completion] = -100
    rows = slice(size.prompt - 1, ids.size(1) - 1)

    def run() -> float:
        started = now(setting.device)
        with torch.no_grad(), ExitStack() as stack:
            if name.startswith("shared"):
                stack.enter_context(share_prompts(model, size.completion))
            probe = stack.enter_context(AttentionProbe(model, masks, rows=rows)) if "probe" in name else None
            model(**batch, labels=labels, fused_lm_head=True)
            if probe is not None:
                _ = probe.mass
        return now(setting.device) - started

    return run


class _Timer(TrainerCallback):
    """Seconds of the latest optimizer step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.started = self.seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = now(self.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = now(self.device) - self.started


def uneven_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Another value for nearly every completion, so that there is something to learn."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def _step(setting: Setting, size: Size, model: Any, processor: Any, name: str) -> Run:
    """One optimizer step: generation, scoring, training."""
    timer = _Timer(setting.device)
    trainer_class: Any
    ours: tuple[Any, Any] = (DAPOTrainer, partial(DAPOConfig, rollout_log_steps=0, attention_reward_scale="none"))
    trainer_class, config = (GRPOTrainer, GRPOConfig) if name == "trl" else ours
    trainers: list[Any] = []

    def run() -> float:
        if not trainers:
            features = Features({"prompt": List({"role": Value("string"), "content": Value("string")})})
            features["image"] = ImageFeature()
            trainers.append(
                trainer_class(
                    model=model if setting.one_model else copy.deepcopy(model),
                    reward_funcs=[uneven_reward, vgr_reward] if name == "vgr" else uneven_reward,
                    args=config(**_options(setting, size, processor), **STEPS[name]),
                    train_dataset=Dataset.from_list([make_question(size, processor)], features=features),
                    processing_class=processor,
                    callbacks=[timer],
                )
            )
            trainers[0].remove_callback(PrinterCallback)
        trainers[0].train()
        return timer.seconds

    return run


def _options(setting: Setting, size: Size, processor: Any) -> dict[str, Any]:
    """Without tokens that stand for images and videos: random weights would write some."""
    special = processor.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": setting.device == "cpu",
        "bf16": setting.dtype == "bfloat16",
        "gradient_checkpointing": setting.checkpointing,
        "per_device_train_batch_size": size.generations,
        "gradient_accumulation_steps": 1,
        "num_generations": size.generations,
        "max_completion_length": size.completion,
        "generation_kwargs": {"min_new_tokens": size.completion, "suppress_tokens": special},
        "epsilon_high": 0.28,
        "max_steps": 1,
        "learning_rate": 1e-6,
        "optim": setting.optim,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "logging_strategy": "no",
    }


def run_again_for_timing() -> None:
    """Start this command anew with `TIMING_ENVIRONMENT`, unless it has it; for all that is compared alike."""
    if not os.environ.keys() >= TIMING_ENVIRONMENT.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **TIMING_ENVIRONMENT})
