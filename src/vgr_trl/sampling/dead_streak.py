"""Noticing that no group has had a gradient for several steps in a row, and why."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgr_trl.config import DAPOConfig

LONGEST = 5  # steps in a row without a live group, after which there is a warning


class DeadStreak:
    """Counts the steps for which every generated group was dead, and what made them so."""

    def __init__(self, args: "DAPOConfig") -> None:
        self._args = args
        served = (args.steps_per_generation or 1) * args.num_iterations // args.gradient_accumulation_steps
        self._steps_per_rollout = max(served, 1)
        self._start_over()

    def _start_over(self) -> None:
        self._first: int | None = None
        self._warned = False
        self._groups = self._equal = self._filtered = 0
        self._means: list[float] = []

    def add(self, groups: int, equal: Collection[int], filtered: Collection[int], means: Sequence[float]) -> None:
        """Take in the groups of one generation.

        Args:
            groups: how many.
            equal: numbers of those whose rewards do not differ.
            filtered: numbers of those that online filtering leaves out.
            means: per group, what online filtering looks at; empty without it.
        """
        only_filtered = set(filtered).difference(equal)
        self._groups += groups
        self._equal += len(equal)
        self._filtered += len(only_filtered)
        self._means += [means[group] for group in only_filtered if not math.isnan(means[group])]

    def end_rollout(self, step: int, live: int) -> str | None:
        """Return one sentence when the streak reaches `LONGEST` steps, once for each streak.

        Args:
            step: global step of the rollout, counted from 0.
            live: groups generated for it that have a gradient, further prompts included.
        """
        if live:
            self._start_over()
            return None
        self._first = step if self._first is None else self._first
        lasted = step - self._first + self._steps_per_rollout
        if lasted < LONGEST or self._warned:
            return None
        self._warned = True
        return self._sentence(lasted)

    def _sentence(self, steps: int) -> str:
        args, reasons, remedies = self._args, [], []
        if self._equal:
            reasons.append(
                f"{self._equal} have rewards that do not differ (replay_var_epsilon {args.replay_var_epsilon})"
            )
            remedies.append("use questions or rewards for which the completions of a prompt differ")
        if self._filtered:
            found = f" (they are {min(self._means):.3g} to {max(self._means):.3g})" if self._means else ""
            reasons.append(
                f"{self._filtered} are left out by online_filtering, because their means of filter_key "
                f"{args.filter_key}{found} are not between {'the quantiles ' * (args.filter_mode == 'quantile')}"
                f"filter_low {args.filter_low:g} and filter_high {args.filter_high:g}"
            )
            remedies.append("give bounds that such means lie between")
        effect = "only replayed groups are trained on" if args.replay_buffer_size else "nothing is trained"
        return (
            f"No group has had a gradient for {steps} steps, so {effect}: of {self._groups} groups "
            f"{' and '.join(reasons)}; {', or '.join(remedies)}."
        )
