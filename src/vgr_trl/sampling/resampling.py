"""Dynamic sampling: further prompts take the place of those whose completions carry no gradient.

DAPO (https://huggingface.co/papers/2503.14476) generates until the batch is full of groups with a gradient; here the
number of rounds is limited. Everything is counted in groups and is the same on every process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any


@dataclass
class Resampling:
    """Which groups of one batch still have to be replaced, and what that has taken so far.

    Attributes:
        missing: numbers of the groups of the batch without a gradient, in order.
        generated: groups generated in them.
        used: groups of them that went into the batch.
    """

    missing: list[int]
    max_rounds: int
    rounds: int = field(default=0, init=False)
    generated: int = field(default=0, init=False)
    used: int = field(default=0, init=False)

    @property
    def wants_more(self) -> bool:
        """Whether another round is due."""
        return bool(self.missing) and self.rounds < self.max_rounds

    @property
    def discarded(self) -> int:
        """Groups of further prompts that were generated and not used: dead as well, or more than were missing."""
        return self.generated - self.used

    def take(self, live: Sequence[int], num_groups: int) -> dict[int, int]:
        """Count a round and return where its groups go: number in the batch -> number in the round.

        Args:
            live: numbers of the round's groups that have a gradient, in order.
            num_groups: groups of the round.
        """
        places = dict(zip(self.missing, live, strict=False))
        self.missing = self.missing[len(places) :]
        self.rounds += 1
        self.generated += num_groups
        self.used += len(places)
        return places


def prompts_of_round(missing: int, num_generations: int, num_processes: int) -> int:
    """Return how many prompts to draw so that `missing` groups could be replaced.

    It is the smallest number of at least `missing` whose completions can be dealt to the processes equally.

    Args:
        missing: groups to replace, at least 1.
    """
    step = num_processes // gcd(num_processes, num_generations)
    return -(-missing // step) * step


def rows_of_process(
    prompts: Sequence[dict[str, Any]], num_generations: int, process_index: int, num_processes: int
) -> list[dict[str, Any]]:
    """Return this process's rows of a round, G adjacent ones per prompt over all processes.

    Args:
        prompts: rows of the data set, as many as `prompts_of_round` says; the same on every process.
    """
    repeated = [dict(prompt) for prompt in prompts for _ in range(num_generations)]
    rows = len(repeated) // num_processes
    return repeated[process_index * rows : (process_index + 1) * rows]
