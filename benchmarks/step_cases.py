"""The rollouts of the benchmark of steps: which rows are alive, how long they are, what is trained."""

import math
import random
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from sharing_models import MODEL_SHAPES, ModelShape, Size

SPREAD = 0.6  # standard deviation of the logarithm of a length
MEAN = 0.4  # of the lengths, as a share of the longest


@dataclass(frozen=True)
class Case:
    """One rollout, and a model that is trained on it.

    Attributes:
        title: what it stands for.
        size: P, V, T and G.
        prompts: different ones.
        dead: of these, those whose completions all earn the same.
        uneven: whether lengths are log-normal; else all are T.
        adapters: LoRA on the language model, tower frozen; else all weights are trained.
        shape: of the model.
        variants: name -> options of `DAPOConfig`; `trl` is TRL's own trainer.
        steps: among which the prompts are dealt out.
        scored_share: of the tokens of a live row, those whose log-probabilities have a gradient.
        goals: name of a figure -> its goal.
    """

    title: str
    size: Size
    prompts: int
    dead: int
    uneven: bool
    adapters: bool
    shape: ModelShape
    variants: dict[str, dict[str, Any]]
    steps: int = 1
    scored_share: float = 1.0
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of the rollout."""
        return self.prompts * self.size.generations

    @property
    def sizes(self) -> list[Size]:
        """(prompts,)"""
        return [self.size] * self.prompts

    @property
    def lengths(self) -> list[int]:
        """(rows,) tokens of each completion: quantiles of the distribution in a fixed order, some of them T."""
        if not self.uneven:
            return [self.size.completion] * self.rows
        lengths = log_normal(self.rows, self.size.completion)
        random.Random(0).shuffle(lengths)
        return lengths

    def is_dead(self, prompt: int) -> bool:
        """Whether the completions of a prompt earn the same."""
        return prompt < self.dead


def log_normal(count: int, longest: int) -> list[int]:
    """Quantiles of a log-normal distribution, in ascending order, whose mean is `MEAN` of the longest."""
    quantiles = [NormalDist().inv_cdf((one + 0.5) / count) for one in range(count)]

    def cut(scale: float) -> list[int]:
        return [min(max(round(math.exp(scale + SPREAD * one)), 1), longest) for one in quantiles]

    low, high = 0.0, math.log(longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < MEAN * longest * count else (low, middle)
    return cut(high)


NONE: dict[str, Any] = {"compute_attention_metrics": False}
SIGNALS: dict[str, Any] = {
    "compute_attention_metrics": True,
    "token_weights": True,
    "enable_trajectory_reweighting": True,
    "replay_buffer_size": 8,
}
ROWS = "per_device_train_batch_size"  # of a micro-batch; without it, a whole group
FILTER: dict[str, Any] = {**NONE, "enable_perception_filtering": True, "top_p_perception_tokens": 0.2}


def cases(*, quick: bool = False, shape: str | None = None) -> dict[str, Case]:
    """The rollouts by name; on a GPU of one of `MODEL_SHAPES`, else of models that a CPU trains in seconds."""
    # A head that is to the layers as that of a 3B model; no other side of a matrix is as long as the vocabulary.
    small = replace(ModelShape.square(256, 4), vocabulary=1663)
    as_before, long = Size(768, 512, 128, 8), Size(768, 512, 512, 8)
    pages, short = Size(2048, 1536, 128, 16), Size(32, 16, 128, 8)
    large = replace(ModelShape.square(512, 4), vocabulary=1040)
    if quick:
        small = replace(ModelShape.square(64, 2), vocabulary=2080)
        as_before, long, large = Size(96, 64, 16, 4), Size(96, 64, 48, 4), small
        pages, short = Size(192, 128, 16, 4), Size(32, 16, 16, 4)
    if shape is not None:
        small = large = MODEL_SHAPES[shape]
    realistic = Case(
        title="b: lengths log-normal, two of five groups dead, LoRA, tower frozen",
        size=as_before,
        prompts=5,
        dead=2,
        uneven=True,
        adapters=True,
        shape=small,
        variants={"trl": {}, "ours": NONE},
        goals={"update seconds": 0.11, "update bytes": 0.25, "step seconds": 0.18, "update operations": 1.15},
    )
    one_group = Case(
        title="one: one group of a long prompt, one completion in a micro-batch, all weights trained",
        size=pages,
        prompts=1,
        dead=0,
        uneven=False,
        adapters=False,
        shape=small,
        variants={"trl": {ROWS: 1}, "ours": {**NONE, ROWS: 1}},
        goals={"update seconds": 0.25, "update bytes": 0.35, "update operations": 1.1},
    )
    return {
        "a": Case(
            title="a: one group, all alive and of full length, all weights trained",
            size=as_before,
            prompts=1,
            dead=0,
            uneven=False,
            adapters=False,
            shape=large,
            variants={"trl": {}, "ours": NONE},
            goals={"update seconds": 0.14, "update bytes": 0.25, "step seconds": 0.21, "update operations": 1.15},
        ),
        "b": realistic,
        "c": replace(
            realistic,
            title="c: as b, with longer completions and a perception filter of 0.2",
            size=long,
            variants={"trl": {}, "ours": FILTER},
            scored_share=0.2,
            goals={"update seconds": 0.17, "update bytes": 0.25, "update operations": 1.15},
        ),
        "signals": replace(
            realistic,
            title="signals: as b, all groups alive (a buffer then replaces none); every signal against none",
            dead=0,
            variants={
                "none": NONE,
                "metrics": {"compute_attention_metrics": True},
                "signals": SIGNALS,
                "generated": {**SIGNALS, "attention_source": "generate"},
            },
            goals={"step seconds": 1.40, "step bytes": 1.3},
        ),
        "one": one_group,
        "two": replace(
            one_group,
            title="two: one group, two completions in a micro-batch, all weights trained",
            size=as_before,
            variants={"trl": {ROWS: 2}, "ours": {**NONE, ROWS: 2}},
            goals={"update seconds": 0.30},
        ),
        "short": replace(
            one_group,
            title="short: as one, with a short prompt",
            size=short,
            goals={"update seconds": 1.02},
        ),
        "b one": replace(
            realistic,
            title="b one: as b, one completion in a micro-batch, against whole groups",
            variants={"whole": NONE, "one": {**NONE, ROWS: 1}},
            goals={"update seconds": 1.3},
        ),
    }
