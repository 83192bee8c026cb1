"""Optimizer steps of a case: seconds, operations and peak memory of the step and of its update."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from peft import LoraConfig
from sharing_measure import ATTENTION_ON_CPU, MEMORY_ENVIRONMENT, resident_peak
from sharing_models import ModelShape, build_model, make_processor, make_question
from sharing_passes import now
from stage_passes import LORA
from step_cases import ROWS, Case, cases
from step_limit import RANK
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.trainer import DAPOTrainer


@dataclass(frozen=True)
class Place:
    """Where steps run."""

    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "sdpa"
    threads: int = 2
    quick: bool = False
    shape: str | None = None
    checkpointing: bool = False

    def case(self, name: str) -> Case:
        """A case at the sizes of this place."""
        return cases(quick=self.quick, shape=self.shape)[name]


_ATTENTION = [operation for operation in flop_registry if "attention" in str(operation)]
_PRODUCTS = {operation: flop_registry[operation] for operation in (torch.ops.aten.mm, torch.ops.aten.addmm)}
_PRODUCTS[torch.ops.aten.addmm_] = _PRODUCTS[torch.ops.aten.addmm]  # of TRL's head; PyTorch does not count it
Amounts = Counter[str]  # seconds, or operations by part


class _Meter(TrainerCallback):
    """What a step and its update take, of whatever `read` reads; the rollout is what `_prepare_inputs` does."""

    def __init__(self, read: Callable[[], Amounts], device: str) -> None:
        self.read, self.device = read, device
        self.started, self.step, self.rollout = Amounts(), Amounts(), Amounts()
        self.stages: dict[str, Amounts] = {}
        self.peaks = {"rollout": 0, "update": 0}  # bytes

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started, self.rollout, self.stages = self.read(), Amounts(), {}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step = _difference(self.read(), self.started)
        self._keep_peak("update")

    def _keep_peak(self, part: str) -> None:
        """What memory has been at most since the last call."""
        self.peaks[part] = max(self.peaks[part], take_peak(self.device))

    def watch(self, trainer: Any) -> None:
        """Tell the rollouts of a trainer from its training passes, and of ours the stages of a step."""
        if isinstance(trainer, DAPOTrainer):
            self._watch_stages(trainer.run.clock)
        plain = trainer._prepare_inputs

        def prepare(*args: Any) -> Any:
            before = self.read()
            self._keep_peak("update" if self.rollout else "rollout")
            try:
                return plain(*args)
            finally:
                self._keep_peak("rollout")
                self.rollout.update(_difference(self.read(), before))

        trainer._prepare_inputs = prepare

    def _watch_stages(self, clock: Any) -> None:
        switch, since = clock._switch, Amounts()

        def counted() -> None:
            nonlocal since
            now = self.read()
            if clock._running:
                self.stages.setdefault(clock._running[-1], Amounts()).update(_difference(now, since))
            since = now
            switch()

        clock._switch = counted

    @property
    def found(self) -> dict[str, Amounts]:
        """Of the latest step; its stages are named as in `time/...`."""
        stages = {f"stage {name}": amounts for name, amounts in self.stages.items()}
        return {"step": self.step, "update": _difference(self.step, self.rollout), **stages}


def _difference(later: Amounts, earlier: Amounts) -> Amounts:
    return Amounts({name: value - earlier[name] for name, value in later.items()})


class StepRun:
    """One optimizer step over a rollout of a case, by one of its variants, again and again."""

    def __init__(self, place: Place, case: Case, variant: str, read: Callable[[], Amounts]) -> None:
        torch.set_num_threads(place.threads)
        self.meter = _Meter(read, place.device)
        processor = make_processor(case.shape.patch)
        trainer_class: Any
        ours: tuple[Any, Any] = (DAPOTrainer, partial(DAPOConfig, rollout_log_steps=0, check_pixels=False))
        trainer_class, config = (GRPOTrainer, GRPOConfig) if variant == "trl" else ours
        options: dict[str, Any] = {"device": place.device, "dtype": place.dtype, "attention": place.attention}
        model = build_model(case.shape, processor.tokenizer, **options)
        if case.adapters:
            adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LORA)
            more = {"peft_config": adapters}
        else:
            more = {}
        self.trainer = trainer_class(
            model=model,
            reward_funcs=_reward,
            args=config(**_options(place, case, processor, case.variants[variant])),
            train_dataset=_questions(case, processor),
            processing_class=processor,
            callbacks=[self.meter],
            **more,
        )
        self.trainer.remove_callback(PrinterCallback)
        self.meter.watch(self.trainer)
        _cut_completions(self.trainer, case.lengths)

    def __call__(self) -> dict[str, Amounts]:
        """What the step and its update took."""
        self.trainer.train()
        return self.meter.found


def _questions(case: Case, processor: Any) -> Dataset:
    """A prompt each, with an image of its own, and whether its group is to be dead."""
    features = Features({"prompt": List({"role": Value("string"), "content": Value("string")})})
    features |= {"image": ImageFeature(), "dead": Value("bool")}
    sizes = enumerate(case.sizes)
    rows = [make_question(size, processor, seed) | {"dead": case.is_dead(seed)} for seed, size in sizes]
    return Dataset.from_list(rows, features=Features(features))


def _reward(completion_ids: list[list[int]], dead: list[bool], **kwargs: Any) -> list[float]:
    """Another value for nearly every completion of a live group."""
    return [0.5 if is_dead else sum(ids) % 17 / 17 for ids, is_dead in zip(completion_ids, dead, strict=True)]


def _cut_completions(trainer: Any, lengths: list[int]) -> None:
    """Let completions, which random weights never end, end at given lengths, of one rollout after the other."""
    plain, end, every = trainer._generate_single_turn, trainer._tokenizer.eos_token_id, cycle(lengths)

    def generate(*args: Any, **kwargs: Any) -> Any:
        written, *rest = plain(*args, **kwargs)
        return (
            [
                row if len(row) == length else [*row[: length - 1], end]
                for row, length in zip(written, every, strict=False)
            ],
            *rest,
        )

    trainer._generate_single_turn = generate


def _options(place: Place, case: Case, processor: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a variant; tokens that stand for images and videos are not generated."""
    rows = variant.get(ROWS, case.size.generations)
    special = processor.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": place.device == "cpu",
        "bf16": place.dtype == "bfloat16",
        "gradient_checkpointing": place.checkpointing,
        ROWS: rows,
        "gradient_accumulation_steps": case.rows // rows // case.steps,
        "num_generations": case.size.generations,
        "max_completion_length": case.size.completion,
        "generation_kwargs": {"min_new_tokens": case.size.completion, "suppress_tokens": special},
        "epsilon_high": 0.28,
        "max_steps": case.steps,
        "shuffle_dataset": False,
        "learning_rate": 1e-6,
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "logging_strategy": "no",
    } | variant


def time_in_turns(place: Place, name: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of steps of all variants in turns, after a small one of each that warms up."""
    case = place.case(name)

    def read() -> Amounts:
        return Amounts({"seconds": now(place.device)})

    small = Place(**{**vars(place), "quick": True, "shape": None})
    warm_up = place if place.device != "cpu" else small
    for variant in case.variants:
        StepRun(warm_up, warm_up.case(name), variant, read)()
    runs = {variant: StepRun(place, case, variant, read) for variant in case.variants}
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in runs}
    for turn in range(repeats):
        order = list(runs) if turn % 2 else list(reversed(runs))
        for variant in order:
            found[variant].append({part: taken["seconds"] for part, taken in runs[variant]().items()})
    return found


def count_elsewhere(place: Place, name: str, variant: str) -> dict[str, Any]:
    """Operations, and peak memory above that before the step, of one step in a process of its own."""
    task = {"place": vars(place), "name": name, "variant": variant}
    output = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, json.dumps(task)],
        env={**os.environ, **MEMORY_ENVIRONMENT},
        check=True,
        capture_output=True,
        text=True,
    )
    counted: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return counted


def _count(task: dict[str, Any]) -> None:
    """In the process of its own."""
    place = Place(**task["place"])
    case = place.case(task["name"])
    operations = Operations(case.shape)
    run = StepRun(place, case, task["variant"], operations.read)
    before = torch.cuda.memory_allocated() if place.device.startswith("cuda") else _resident()
    with operations.counter:
        found = run()
    peaks = {"update": run.meter.peaks["update"], "step": max(run.meter.peaks.values())}
    print(json.dumps({"operations": found, "bytes": {part: peak - before for part, peak in peaks.items()}}))


def take_peak(device: str) -> int:
    """Bytes that have been in use at most since the last call."""
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resident_peak()
    Path("/proc/self/clear_refs").write_text("5")
    return peak


class Operations(Counter[str]):
    """Operations so far, forward and backward: `attention`, `head`, and `products`, which are all others.

    Attention is counted over all keys of a call, but for calls without a mask that are causal by themselves.

    Args:
        shape: of the model; a product that has the width of the vocabulary is one of the head.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__({"attention": 0, "head": 0, "products": 0})
        kinds = {operation: self._attention(count) for operation, count in ATTENTION_ON_CPU.items()}
        kinds |= {operation: self._attention(flop_registry[operation]) for operation in _ATTENTION}
        kinds |= {operation: self._product(count, shape) for operation, count in _PRODUCTS.items()}
        self.counter = FlopCounterMode(display=False, custom_mapping=kinds)

    def read(self) -> Amounts:
        """Return what has been counted."""
        together = self.counter.get_total_flops()
        return Amounts({**self, "products": together - self["attention"] - self["head"], "together": together})

    def _attention(self, count: Any) -> Callable[..., int]:
        def counted(*shapes: Any, **options: Any) -> int:
            found = count(*shapes)
            if any(value is True for value in shapes):  # is_causal: kernels pass over keys that no query sees
                queries = shapes[0][-2]
                found = found * (queries + 1) // (2 * queries)
            self["attention"] += found
            return found

        return counted

    def _product(self, count: Callable[..., int], shape: ModelShape) -> Callable[..., int]:
        def counted(*shapes: Any, **options: Any) -> int:
            found = count(*shapes)
            sides = {*shapes[-2], *shapes[-1]} if isinstance(shapes[-1], Sequence) else set()
            self["head"] += found if shape.vocabulary in sides else 0
            return found

        return counted


def _resident() -> int:
    """VmRSS of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    _count(json.loads(sys.argv[1]))
