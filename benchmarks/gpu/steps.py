"""Whole steps on batches of different lengths, prompts and images, by TRL's trainer and by ours, each once."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from sharing_models import MODEL_SHAPES, Size
from sharing_passes import now
from step_cases import NONE, ROWS, Case, cases, log_normal
from step_runs import Amounts, Place, StepRun
from transformers import TrainerCallback

from gpu.measure import Budget, Note, cudnn, error_of, release
from gpu.plan import BATCHES, COMPARED, TINY, Measurement

STATIC = {"cache_implementation": "static"}


@dataclass(frozen=True)
class Batches(Case):
    """Some of the batches that a measurement has; number 0 warms up."""

    numbers: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[Size]:
        """Of each batch: sides of the image and words of the prompt are log-normal."""
        sides = _shuffled(log_normal(1 + BATCHES, 2 * round((self.size.vision / 2) ** 0.5)), seed=0)
        others = _shuffled(log_normal(1 + BATCHES, self.size.prompt - self.size.vision), seed=1)
        chosen = [(max(sides[one], 2) ** 2, max(others[one], 24)) for one in self.numbers]
        return [Size(image + words, image, self.size.completion, self.size.generations) for image, words in chosen]

    @property
    def lengths(self) -> list[int]:
        """Of the completions of all batches."""
        group = self.size.generations
        every = _shuffled(log_normal((1 + BATCHES) * group, self.size.completion), seed=2)
        return [length for one in self.numbers for length in every[one * group : (one + 1) * group]]


def _shuffled(values: list[int], seed: int) -> list[int]:
    random.Random(seed).shuffle(values)
    return values


class _EachStep(TrainerCallback):
    """Writes what a step took, and stops where one more would not fit."""

    def __init__(self, run: StepRun, numbers: tuple[int, ...], note: Any, budget: Budget) -> None:
        self.run, self.numbers, self.note, self.budget, self.latest = run, numbers, note, budget, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        meter = self.run.meter
        found = {part: round(taken["seconds"], 4) for part, taken in meter.found.items()}
        self.latest = found["step"]
        number = self.numbers[state.global_step - 1]
        reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        memory = {"peak": max(meter.peaks.values()), "reserved": reserved}
        meter.peaks = dict.fromkeys(meter.peaks, 0)
        seconds = {"seconds" if number else "first": found.pop("step")}
        self.note({"batch": number, **seconds, **found, **memory})
        more = state.global_step < state.max_steps
        control.should_training_stop |= more and not self.budget.fits("the next step", self.latest)


def steps(
    one: Measurement, place: tuple[str, str, str], note: Note, budget: Budget, had: Mapping[str, list[dict[str, Any]]]
) -> None:
    """Steps on the batches that are missing, one variant after the other: TRL's trainer with cuDNN, ours without."""
    device, dtype, attention = place
    for variant in COMPARED[one.kind]:
        there = {found["batch"] for found in had.get(variant, ())}
        numbers = (0, *(batch for batch in range(1, 1 + BATCHES) if batch not in there))
        share = len(numbers) / (1 + BATCHES) / len(COMPARED[one.kind])
        if len(numbers) == 1 or not budget.fits(f"{one.name} {variant}", one.seconds * share):
            continue
        where = Place(device, dtype, attention, torch.get_num_threads(), checkpointing=one.shape not in TINY)
        try:
            with cudnn(True):  # our trainer switches it off
                run = StepRun(where, _case(one, numbers), variant, lambda: Amounts({"seconds": now(device)}))
                run.trainer.add_callback(_EachStep(run, numbers, partial(note, variant), budget))
                run()
            del run
        except Exception as error:
            note(variant, error_of(error))
        release()


def _case(one: Measurement, numbers: tuple[int, ...]) -> Case:
    """Return what all variants of a measurement train on: a step for each batch."""
    if one.kind != "step":
        case = cases()["signals"]
        cache = {} if "growing" in one.kind else STATIC
        variants = {name: {**case.variants[name], **cache} for name in COMPARED[one.kind]}
        sizes = {"size": one.size, "prompts": 2 * len(numbers), "steps": len(numbers)}
        return replace(case, title=one.name, shape=MODEL_SHAPES[one.shape], variants=variants, **sizes)
    rows = {} if one.rows is None else {ROWS: one.rows}
    return Batches(
        title=one.name,
        size=one.size,
        prompts=len(numbers),
        dead=0,
        uneven=True,
        adapters=one.adapters,
        shape=MODEL_SHAPES[one.shape],
        variants={"trl": rows, "ours": {**NONE, **rows}, "ours, static": {**NONE, **rows, **STATIC}},
        steps=len(numbers),
        numbers=numbers,
    )
