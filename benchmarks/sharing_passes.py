"""The passes that are compared: shared and plain, on the same weights and the same questions."""

import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from sharing_models import MODEL_SHAPES, ModelShape, Size, build_model, make_batch, make_processor, make_question
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.demo.tiny_processor import SPECIAL_TOKENS
from vgr_trl.sharing import share_prompts

PLACES = (
    "scoring",
    "training",
    "training with checkpointing",
    "generation",
    "step",
    "step with checkpointing",
)


@dataclass(frozen=True)
class Setting:
    """What stays the same over places and sizes."""

    shape: str = "square"
    hidden: int = 512
    layers: int = 8
    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "sdpa"
    prompts: int = 1

    @property
    def model_shape(self) -> ModelShape:
        """Widths and depths of the model."""
        return ModelShape.square(self.hidden, self.layers) if self.shape == "square" else MODEL_SHAPES[self.shape]


class Run(Protocol):
    """One pass, or one optimizer step."""

    def prepare(self, shared: bool) -> None:
        """Make what stays in memory before and after the pass."""

    def __call__(self, shared: bool) -> float:
        """Make the pass and return its seconds."""


def make_run(setting: Setting, size: Size, place: str) -> Run:
    """The pass at `place`, which can be made again and again."""
    return StepRun(setting, size, place) if place.startswith("step") else PassRun(setting, size, place)


def make_model(setting: Setting, tokenizer: Any) -> Any:
    """Always the same weights."""
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype, "attention": setting.attention}
    return build_model(setting.model_shape, tokenizer, **options)


class PassRun:
    """Scoring, training or generation on a batch."""

    def __init__(self, setting: Setting, size: Size, place: str) -> None:
        tokenizer, patch = make_processor().tokenizer, setting.model_shape.patch
        self.setting, self.size, self.place = setting, size, place
        self.model = make_model(setting, tokenizer)
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype, "patch": patch}
        self.batch = make_batch(size, tokenizer, prompts=setting.prompts, **options)
        if "checkpointing" in place:
            switch_checkpointing_on(self.model)
        self.model.train(place.startswith("training"))

    def prepare(self, shared: bool) -> None:
        """Model and batch are there."""

    def __call__(self, shared: bool) -> float:
        started = now(self.setting.device)
        with share_prompts(self.model, self.size.completion) if shared else nullcontext():
            if self.place == "generation":
                generate(self.model, self.batch, self.size.completion)
            else:
                score(self.model, self.batch, self.size.completion, gradients=self.place != "scoring")
        return now(self.setting.device) - started


def score(model: Any, batch: dict[str, torch.Tensor], completion: int, *, gradients: bool) -> None:
    """Log-probabilities of the completions, and their gradients if wanted."""
    labels = batch["input_ids"].clone()
    labels[:, :-completion] = -100
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        logps = model(**batch, labels=labels, fused_lm_head=True).log_probs
        if gradients:
            logps.sum().backward()


def generate(model: Any, batch: dict[str, torch.Tensor], completion: int) -> None:
    """As many new tokens as the completions have."""
    per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
    prompts = {name: value[:, :-completion] if name in per_token else value for name, value in batch.items()}
    model.generate(**prompts, do_sample=True, min_new_tokens=completion, max_new_tokens=completion)


def switch_checkpointing_on(model: Any) -> None:
    """Without reentrant autograd; transformers 5.20 has renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def now(device: str) -> float:
    """Seconds, when all that was started on the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class _StepTimer(TrainerCallback):
    """Seconds of the latest optimizer step: generation, scoring if TRL wants any, training."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.started = self.seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = now(self.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = now(self.device) - self.started


class StepRun:
    """One optimizer step of this library's trainer, or of TRL's own, on the same questions."""

    def __init__(self, setting: Setting, size: Size, place: str) -> None:
        self.setting, self.size = setting, size
        self.checkpointing = "checkpointing" in place
        self.processor = make_processor(setting.model_shape.patch)
        features = Features({"prompt": List({"role": Value("string"), "content": Value("string")})})
        if size.vision:
            features["image"] = ImageFeature()
        self.rows = Dataset.from_list([make_question(size, self.processor)] * setting.prompts, features=features)
        self.timers = {shared: _StepTimer(setting.device) for shared in (False, True)}
        self.trainers: dict[bool, Any] = {}

    def prepare(self, shared: bool) -> None:
        if shared in self.trainers:
            return
        trainer: Any = DAPOTrainer if shared else GRPOTrainer
        config: Any = partial(DAPOConfig, rollout_log_steps=0) if shared else GRPOConfig
        self.trainers[shared] = trainer(
            model=make_model(self.setting, self.processor.tokenizer),
            reward_funcs=_uneven_reward,
            args=config(**self._options()),
            train_dataset=self.rows,
            processing_class=self.processor,
            callbacks=[self.timers[shared]],
        )
        self.trainers[shared].remove_callback(PrinterCallback)

    def _options(self) -> dict[str, Any]:
        """Completions of T tokens, without those that stand for images and videos: random weights would write some."""
        tokenizer, length = self.processor.tokenizer, self.size.completion
        special = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        return {
            "output_dir": tempfile.mkdtemp(),
            "use_cpu": self.setting.device == "cpu",
            "bf16": self.setting.dtype == "bfloat16",
            "gradient_checkpointing": self.checkpointing,
            "per_device_train_batch_size": self.setting.prompts * self.size.generations,
            "gradient_accumulation_steps": 1,
            "num_generations": self.size.generations,
            "max_completion_length": length,
            "generation_kwargs": {"min_new_tokens": length, "suppress_tokens": special},
            "epsilon_high": 0.28,
            "max_steps": 1,
            "learning_rate": 1e-6,
            "optim": "sgd",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "log_level": "error",
            "logging_strategy": "no",
        }

    def __call__(self, shared: bool) -> float:
        self.prepare(shared)
        self.trainers[shared].train()
        return self.timers[shared].seconds


def _uneven_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Another value for nearly every completion, so that there is something to learn."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]
