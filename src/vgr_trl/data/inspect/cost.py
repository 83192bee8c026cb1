"""How long prompts are for a model, and what a training step costs in tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vgr_trl.errors import ConfigError

MOST_BINS = 12


@dataclass(frozen=True)
class Budget:
    """What a rollout costs.

    Attributes:
        max_prompt_length: in tokens; longer prompts are left out. None: no limit.
        max_completion_length: in tokens.
        num_generations: completions of each prompt.
        prompts_per_step: prompts of one optimizer step, over all processes.

    Raises:
        ConfigError: a number is below 1.
    """

    max_prompt_length: int | None = None
    max_completion_length: int = 512
    num_generations: int = 8
    prompts_per_step: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: give an integer of at least 1.")


@dataclass(frozen=True)
class Cost:
    """Lengths of prompts and the tokens of a step.

    Attributes:
        shortest, median, percentile_95, longest: of the prompts, in tokens.
        mean: of the prompts within the limit, in tokens; 0 if there are none.
        too_long: rows above the limit.
        shared, repeated: most tokens of a step with prompts of mean length and completions of full length, each prompt
            computed once for its completions, or once for each.
    """

    shortest: int
    median: int
    percentile_95: int
    longest: int
    mean: float
    too_long: int
    shared: int
    repeated: int


def cost(lengths: Mapping[int, int], budget: Budget) -> Cost:
    """Return what rows with `lengths` (tokens → rows) cost.

    Percentiles are the smallest length that at least that share of the rows does not exceed.

    Args:
        lengths: at least one.
    """
    limit = math.inf if budget.max_prompt_length is None else budget.max_prompt_length
    kept = {length: rows for length, rows in lengths.items() if length <= limit}
    mean = sum(length * rows for length, rows in kept.items()) / max(1, sum(kept.values()))
    completions = budget.num_generations * budget.max_completion_length
    return Cost(
        shortest=min(lengths),
        median=_quantile(lengths, 0.5),
        percentile_95=_quantile(lengths, 0.95),
        longest=max(lengths),
        mean=mean,
        too_long=sum(lengths.values()) - sum(kept.values()),
        shared=round(budget.prompts_per_step * (mean + completions)),
        repeated=round(budget.prompts_per_step * (budget.num_generations * mean + completions)),
    )


def histogram(lengths: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return at most twelve bins (first length, last length, rows) of equal, round width, from shortest to longest.

    Args:
        lengths: tokens → rows, at least one.
    """
    low, high = min(lengths), max(lengths)
    width = next(
        step * 10**power
        for power in range(20)
        for step in (1, 2, 5)
        if high // (step * 10**power) - low // (step * 10**power) < MOST_BINS
    )
    bins = dict.fromkeys(range(low // width, high // width + 1), 0)
    for length, rows in lengths.items():
        bins[length // width] += rows
    return [(number * width, number * width + width - 1, rows) for number, rows in bins.items()]


def _quantile(lengths: Mapping[int, int], share: float) -> int:
    needed, seen = share * sum(lengths.values()), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= needed:
            return length
    return max(lengths)
