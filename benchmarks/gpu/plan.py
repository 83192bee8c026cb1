"""What is measured on a GPU, in which order, and how long it should take on paper."""

from dataclasses import dataclass, replace

from cost import Load, Machine, seconds
from sharing_models import MERGE, MODEL_SHAPES, Size
from sharing_operations import Update, executed_update, forward_of

PROMPT, VISION, GENERATIONS = 1536, 1280, 8
COMPLETIONS = (384, 1024)
OF_STEPS = 256  # tokens of a completion; generating them takes nearly all of a step
GENERATED = 128  # tokens, where only generation is timed
SHAPES = ("qwen2.5-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-4b", "qwen3-vl-8b")
TINY = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")
PARTS = ("shapes", "passes", "signals", "steps", "generation", "kernels", "packing")
REPEATS, BATCHES = 5, 2
STRATEGIES = ("two stages", "two stages, no mask", "packed", "paths")
CUDNN = ", cuDNN"  # behind the name of a run: with cuDNN's attention, where others have none


def both(*names: str) -> tuple[str, ...]:
    """Each without cuDNN's attention and with it."""
    return tuple(f"{name}{cudnn}" for name in names for cudnn in ("", CUDNN))


COMPARED = {
    "new shape": both("masked", "masked, seen before", "causal", "causal, seen before"),
    "update": (*both("plain", "shared"), "as trained"),
    "scoring": both("trl", "shared", "shared + probe"),
    "signals": ("none", "metrics", "signals"),
    "signals, growing cache": ("none", "signals", "generated"),
    "step": ("trl", "ours", "ours, static"),
    "generation": ("plain", "plain, static", "shared", "shared, static"),
    "attention": (*STRATEGIES, f"two stages{CUDNN}"),
    "packing": ("sdpa", "flash"),
}
BUILD = 20  # seconds for a model of 7B and what else comes before the first pass, a guess
WINDOW = 50e-6  # seconds of the attention of a window of the tower, each a call of its own, a guess
# seconds: cuDNN's plans, a compilation
GUESSED = {"new shape": 30, "attention": 60, "generation": 80, "signals": 70, "signals, growing cache": 60}


SIGNALS = ("signals", "signals, growing cache")


@dataclass(frozen=True)
class Measurement:
    """One row of the results.

    Attributes:
        kind: a key of `COMPARED`.
        shape: a key of `MODEL_SHAPES`.
        size: P, V, T, G.
        adapters: LoRA on every matrix of the language model's layers instead of all weights.
        rows: completions of a micro-batch of a step; None: the whole group.
    """

    kind: str
    shape: str
    size: Size
    adapters: bool = False
    rows: int | None = None

    @property
    def name(self) -> str:
        """In the results."""
        part = "" if self.rows is None else f" micro-batch {self.rows}"
        return f"{self.shape} {self.kind}{' lora' if self.adapters else ''}{part} {self.size}"

    @property
    def repeats(self) -> int:
        """Of each run, after one that warms up."""
        return {"step": BATCHES, "update": 2, "scoring": 3, "generation": 2, **dict.fromkeys(SIGNALS, BATCHES)}.get(
            self.kind, REPEATS
        )

    @property
    def seconds(self) -> float:
        """Of all runs together on a GPU, by benchmarks/cost.py."""
        once = sum(self._once(name) for name in COMPARED[self.kind])
        return BUILD * (len(COMPARED["step"]) if self.kind == "step" else 1) + (1 + self.repeats) * once

    def _once(self, name: str) -> float:
        shape, shared, machine = MODEL_SHAPES[self.shape], name.split(",")[0] not in ("plain", "trl"), Machine()
        if self.kind in GUESSED:
            return GUESSED[self.kind] / len(COMPARED[self.kind]) / (1 + self.repeats)
        windowed = 0 if shape.deepstack else shape.vision_layers - len(shape.whole_image_layers)
        windows = WINDOW * windowed * self.size.vision * MERGE**2 / 64 * (1 if shared else self.size.generations)
        if self.kind == "step":
            return 5 * windows + sum(seconds(Load(shape, self.size, shared=shared, scored=False), machine).values())
        scoring = self.kind == "scoring"
        forward = forward_of(shape, self.size, shared=shared).total
        count = forward if scoring else executed_update(shape, self.size, Update(self.adapters), shared=shared)
        return count / machine.operations / machine.efficiency + (1 if scoring else 4) * windows


def plan(part: str, shape: str) -> list[Measurement]:
    """What a part of `PARTS` measures, the most wanted first."""
    every = [Size(48, 16, 8, 2)] if shape in TINY else [Size(PROMPT, VISION, one, GENERATIONS) for one in COMPLETIONS]
    if part == "passes":
        first, *others = [Measurement(kind, shape, size) for size in every for kind in ("update", "scoring")]
        return [first, Measurement("update", shape, every[0], adapters=True), *others]
    if part == "kernels":
        return [Measurement("attention", shape, size) for size in every]
    if part == "steps":
        size = replace(every[0], completion=min(every[0].completion, OF_STEPS))
        every_way = [(rows, adapters) for rows in (1, None) for adapters in (False, True)]
        return [Measurement("step", shape, size, adapters=adapters, rows=rows) for rows, adapters in every_way]
    if part in ("generation", "signals"):
        size = replace(every[0], completion=min(every[0].completion, GENERATED))
        return [Measurement(kind, shape, size) for kind in (SIGNALS if part == "signals" else [part])]
    size = every[-1] if part == "packing" else every[0]
    return [Measurement({"shapes": "new shape"}.get(part, part), shape, size)]
