"""Which groups of completions are trained on: replay buffer, dynamic sampling, online filtering."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers.utils import logging
from trl.trainer.utils import RepeatSampler

from vgr_trl.advantages import estimate_advantages
from vgr_trl.batch import EXTRA, VIEWS, Gather, Placement, RolloutSignals, Rows, checked, join_rows, valid_tokens
from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.credit import active_rules, masked_mean
from vgr_trl.data.columns import images_of
from vgr_trl.options import is_number
from vgr_trl.registries import VIEW, is_measurement, short_name
from vgr_trl.rollout import Host, Rollout, TrainingPass, Verdict, weighted_sums
from vgr_trl.signals.scoring import Wanted
from vgr_trl.utils import ConfigError, DataError

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig


__all__ = [
    "DeadStreak",
    "Group",
    "Placement",
    "PromptStream",
    "ReplayBuffer",
    "Resampling",
    "correct_num_items",
    "dead_groups",
    "filter_index",
    "filter_rewards",
    "filtered_groups",
    "group_means",
    "groups_from_batch",
    "merge_states",
    "prompts_of_round",
    "quantile_bounds",
    "rows_of_process",
    "split_state",
    "with_old_logps",
    "write_groups_into_batch",
]


# ---------------------------------------------------------------------------------------------------------------------
# States of a replay buffer over processes: each saves its own; another number of processes can continue.


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the rows of all groups, from the states that the processes of a run saved together.

    Args:
        states: what `ReplayBuffer.state_dict` returned on each process, in any order.

    Raises:
        DataError: they are not of the same moment, or the state of a process is missing.
    """
    first = states[0]
    if any((state["added"], state["numbers"]) != (first["added"], first["numbers"]) for state in states):
        raise DataError(
            "The states of the replay buffer are not of the same step: give those that one checkpoint holds."
        )
    groups = []
    for index, number in enumerate(first["numbers"]):
        found = [state["groups"][index] for state in states if state["groups"][index]["rows"] is not None]
        if not found:
            raise DataError(
                f"Group {number} of the replay buffer is in none of its {len(states)} states: give those of all "
                "processes that saved the checkpoint."
            )
        groups.append(found[0])
    return {**first, "groups": groups}


def split_state(state: Mapping[str, Any], process_index: int, num_processes: int) -> dict[str, Any]:
    """Return the share of one process: all groups, every `num_processes`-th of them with its rows.

    Args:
        state: with the rows of all groups, as `merge_states` returns it.
    """
    groups = []
    for index, group in enumerate(state["groups"]):
        holder = index % num_processes
        groups.append({**group, "holder": holder, "rows": group["rows"] if holder == process_index else None})
    return {**state, "groups": groups}


# ---------------------------------------------------------------------------------------------------------------------
# Which groups of a rollout batch carry no gradient, or are not wanted.
#
# All tensors are of all processes, prompt-major, so that every process finds the same groups.


def dead_groups(
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    num_generations: int,
    *,
    estimator: str = "grpo",
    epsilon: float = 1e-6,
) -> list[int]:
    """Return the numbers of the groups without a gradient.

    A group is dead when its largest |advantage| is at most `epsilon`; for `grpo`, whose advantages are divided by the
    deviation of the rewards, when that deviation is. A group with fewer than two rewards is dead for `grpo`.

    Args:
        advantages: (num_groups * G,).
        rewards: weighted sums, (num_groups * G,), NaN for a completion without any.
        epsilon: at least 0.
    """
    return _numbers(~(signal(advantages, rewards, num_generations, estimator=estimator) > epsilon))


def signal(
    advantages: torch.Tensor, rewards: torch.Tensor, num_generations: int, *, estimator: str = "grpo"
) -> torch.Tensor:
    """Return what a dead group has none of, (num_groups,): the deviation of its rewards, or its largest |advantage|.

    Args: as for `dead_groups`.
    """
    if estimator == "grpo":
        return group_std(rewards, num_generations)
    return advantages.detach().double().view(-1, num_generations).abs().amax(dim=1)


def group_std(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the standard deviation (n - 1) of rewards per group, (num_groups,): NaN left out, 0 for fewer than 2."""
    groups = rewards.detach().double().view(-1, num_generations)
    count = (~groups.isnan()).sum(dim=1)
    squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
    return torch.where(count > 1, (squares / (count - 1)).sqrt(), 0.0)


def filtered_groups(
    rewards: torch.Tensor, num_generations: int, *, low: float, high: float, inclusive: bool = False
) -> list[int]:
    """Return the numbers of the groups whose mean reward is not between `low` and `high`.

    A group without any reward is among them. The filter of PRIME (https://huggingface.co/papers/2502.01456).

    Args:
        rewards: one number per completion, (num_groups * G,), NaN for one without; see `filter_rewards`.
        inclusive: whether a mean at a bound is between them.
    """
    means = group_means(rewards, num_generations)
    inside = (means >= low) & (means <= high) if inclusive else (means > low) & (means < high)
    return _numbers(~inside)


def quantile_bounds(rewards: torch.Tensor, num_generations: int, *, low: float, high: float) -> tuple[float, float]:
    """Return two quantiles of the mean rewards of groups, interpolated linearly; NaN if no group has a reward.

    Args:
        rewards: as for `filtered_groups`, of the groups that are compared.
        low: in [0, 1].
        high: in [0, 1].
    """
    means = group_means(rewards, num_generations)
    return means.nanquantile(low).item(), means.nanquantile(high).item()


def group_means(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the mean reward of each group, (num_groups,) float64; NaN left out, and NaN for a group without any."""
    return rewards.detach().double().view(-1, num_generations).nanmean(dim=1)


def filter_rewards(
    key: str, names: Sequence[str], rewards_per_func: torch.Tensor, rewards: torch.Tensor
) -> torch.Tensor:
    """Return the rewards that online filtering looks at, (num_groups * G,).

    Args:
        key: `overall`, the name of a reward function with or without its last part (`accuracy` for `accuracy_reward`),
            or a part of it between underscores that no other has.
        rewards_per_func: unweighted, (num_groups * G, number of functions).
        rewards: weighted sums, (num_groups * G,).

    Raises:
        ConfigError: no reward function, or more than one, has that name.
    """
    index = filter_index(key, names)
    return rewards if index is None else rewards_per_func[:, index]


def filter_index(key: str, names: Sequence[str]) -> int | None:
    """Return the position of the reward function that `key` names, None for `overall`; see `filter_rewards`."""
    if key == "overall":
        return None
    found = [index for index, name in enumerate(names) if name in (key, f"{key}_reward")]
    found = found or [index for index, name in enumerate(names) if key in name.split("_")]
    if len(found) != 1:
        raise ConfigError(
            f"filter_key is {key!r}, which names {len(found)} reward functions: give overall or one of "
            f"{', '.join(names)}."
        )
    return found[0]


def _numbers(chosen: torch.Tensor) -> list[int]:
    return chosen.nonzero().flatten().tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Noticing that no group has had a gradient for several steps in a row, and why.


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


# ---------------------------------------------------------------------------------------------------------------------
# Groups: the completions of one prompt, taken out of a rollout batch.


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class Group:
    """The G completions of one prompt, with all that training on them again takes.

    Every process knows of every group; one of them, the holder, has its rows.

    Attributes:
        advantages: (G,) float32, on the CPU.
        rewards: (G,) float32, weighted sums; NaN for a completion without any. On the CPU.
        step: global step at which it was generated.
        holder: process that has the rows.
        rows: on the CPU, no longer than the group's own longest prompt and completion; None on other processes.
    """

    advantages: torch.Tensor
    rewards: torch.Tensor
    step: int = 0
    holder: int = 0
    rows: Rows | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its rows on this process, image inputs that they share counted once."""
        return 0 if self.rows is None else self.rows.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return the group as tensors, numbers, lists and dictionaries."""
        state = {name: getattr(self, name) for name in ("advantages", "rewards", "step", "holder")}
        return {**state, "rows": None if self.rows is None else dict(vars(self.rows))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Group":
        """Return the group that `state_dict` described."""
        rows = state["rows"]
        return cls(**{**state, "rows": None if rows is None else Rows(**rows)})


def groups_from_batch(
    batch: Mapping[str, Any],
    wanted: Sequence[int],
    placement: Placement,
    *,
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    pad_token_id: int,
    step: int = 0,
    signals: RolloutSignals | None = None,
    gather: Gather | None = None,
) -> list[Group]:
    """Return the groups with the numbers `wanted`, copied to the CPU.

    The process with a group's first completion becomes its holder. If any wanted group is spread over processes, all
    of them call `gather` once, to bring its other rows there.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them.
        wanted: numbers of groups, the same on every process.
        advantages: of all processes, (num_groups * G,); those of `batch` are not read.
        rewards: weighted sums, likewise.
        gather: over the processes; None if there is one.

    Raises:
        DataError: the batch cannot be cut into rows, or `gather` is missing.
    """
    placement.check(wanted)
    rows = Rows.of_batch(batch, signals)
    rows.columns.pop("advantages", None)
    lengths = [batch[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask")]
    pieces = {}
    for group in wanted:
        if here := [row for row, _ in placement.here(group)]:
            widths = [max(1, *(lengths_of[row] for row in here)) for lengths_of in lengths]
            pieces[group] = rows.take(here).narrowed(*widths).stored()
    holders = {group: placement.holder(group) for group in wanted}
    whole = placement.bring_to_holders(pieces, holders, gather)
    kept = {group: _joined(parts, pad_token_id) for group, parts in whole.items()}
    compared = [
        value.detach().to("cpu", torch.float32).view(-1, placement.num_generations) for value in (advantages, rewards)
    ]
    return [
        Group(
            advantages=compared[0][group].clone(),
            rewards=compared[1][group].clone(),
            step=step,
            holder=holders[group],
            rows=kept.get(group),
        )
        for group in wanted
    ]


def _joined(parts: list[Rows], pad_token_id: int) -> Rows:
    return parts[0] if len(parts) == 1 else join_rows(parts, pad_token_id=pad_token_id).stored()


def with_old_logps(
    groups: Mapping[int, Group], old_per_token_logps: torch.Tensor, placement: Placement, gather: Gather | None = None
) -> dict[int, Group]:
    """Return the groups with the log-probabilities of the policy that generated them.

    For batches that come without: TRL leaves them out while they equal those of the first training pass, which is
    where they are taken from. They go to the process that holds the group, which for a group of another round of
    generation need not be one of those that train on it; then, and if it is spread, all call `gather` once.

    Args:
        groups: number in the batch -> group; the same numbers on every process.
        old_per_token_logps: of the local rows of that batch, in its order, (N, T).
    """
    pieces = {}
    for group in groups:
        if here := [row for row, _ in placement.here(group)]:
            pieces[group] = old_per_token_logps[here].detach().cpu()  # (rows of the group here, T)
    completed = dict(groups)
    holders = {number: group.holder for number, group in groups.items()}
    for group, parts in placement.bring_to_holders(pieces, holders, gather).items():
        rows = groups[group].rows
        if rows is None:
            raise DataError(f"Group {group} has no rows on process {holders[group]}, which is to hold it.")
        length = rows.completion_length
        logps = [torch.nn.functional.pad(part, (0, max(0, length - part.size(1))))[:, :length] for part in parts]
        columns = {**rows.columns, "old_per_token_logps": torch.cat(logps)}
        completed[group] = replace(groups[group], rows=replace(rows, columns=columns))
    return completed


# ---------------------------------------------------------------------------------------------------------------------
# Further prompts of the training set, away from those of the epoch; the same on every process.


AHEAD = 32  # rollouts that a stream is read ahead of the epoch, at least where it is long enough


def _any_row(row: Any) -> bool:
    return True


class PromptStream:
    """Draws rows of a data set again and again, and keeps away from those that the epoch draws.

    A data set with a length is shuffled anew for each pass over it, independently of the order of the epochs. Left out
    is what the epoch has drawn and what is drawn within a quarter of the data before or after; where nothing else
    remains, only the latter; then nothing.

    A stream is read in its own order, `AHEAD` rollouts ahead of the epoch (half of its rows, if it is short), and
    started again at its end; after an interruption it is read again up to where it was.

    Args:
        dataset: rows, by number or one after the other.
        seed: of the order.
        batch: rows that the epoch draws for a rollout.
        order: epoch -> numbers of the rows that it draws, in order; None: it is not known.
    """

    def __init__(
        self, dataset: Any, seed: int = 0, *, batch: int = 1, order: Callable[[int], list[int]] | None = None
    ) -> None:
        self.dataset, self.seed, self.batch, self.order = dataset, seed, batch, order
        self.drawn = 0  # rows passed so far, left out or not
        self.length: int | None = len(dataset) if hasattr(dataset, "__len__") else None  # of a stream, once it ended
        self._rows: Iterator[Any] | None = None
        self._ends = 0

    def draw(self, count: int, rollout: int = 0, usable: Callable[[Any], bool] = _any_row) -> list[Any]:
        """Return the next `count` rows, fewer if a pass over the data finds no more.

        Args:
            count: at least 1.
            rollout: how many rollouts have begun before the one at hand, over all epochs.
            usable: whether to return a row; called once for each in question.

        Raises:
            DataError: the data set has no rows.
        """
        if self.length == 0:
            raise DataError("The data set has no rows to draw further prompts from.")
        rows = self._by_number(rollout) if hasattr(self.dataset, "__len__") else self._ahead(rollout)
        return list(islice(filter(usable, rows), count))

    # With a length

    def _by_number(self, rollout: int) -> Iterator[Any]:
        length = len(self.dataset)
        self._rows = self._rows or self._shuffled(*divmod(self.drawn, length))
        for avoided in self._avoided(rollout):
            for _ in range(2 * length if len(avoided) < length else 0):  # the rest of a pass and all of another
                self.drawn += 1
                if (index := next(self._rows)) not in avoided:
                    yield self.dataset[index]

    def _shuffled(self, turn: int, passed: int) -> Iterator[int]:
        while True:
            name = hashlib.sha256(f"further prompts {self.seed} {turn}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(name[:8], "big") >> 1)
            yield from torch.randperm(len(self.dataset), generator=generator).tolist()[passed:]
            turn, passed = turn + 1, 0

    def _avoided(self, rollout: int) -> list[Collection[int]]:
        """Numbers to leave out, the most desirable choice first."""
        rollouts = len(self.dataset) // self.batch  # per epoch, which drops the rest
        if self.order is None or rollouts == 0:
            return [()]
        epoch, place = divmod(rollout, rollouts)
        before = self.order(epoch - 1) if epoch else []
        order = before + self.order(epoch) + self.order(epoch + 1)
        now, quarter = len(before) + place * self.batch, max(1, rollouts // 4) * self.batch
        soon = order[now : now + self.batch + quarter]
        recently = order[max(0, now - quarter) : now]
        return [{*order[len(before) : now], *recently, *soon}, {*recently, *soon}, ()]

    # Without one

    def _ahead(self, rollout: int) -> Iterator[Any]:
        self._rows = self._rows or self._read(self.drawn % (self.length or self.drawn + 1))
        last = self._ends + 2
        while self._ends < last:
            row = next(self._rows)
            away = self._is_away(rollout)
            self.drawn += 1
            if away and self._ends < last:
                yield row

    def _is_away(self, rollout: int) -> bool:
        """Whether the row at hand is far from those that the epoch draws."""
        ahead = AHEAD * self.batch
        if self.length is None:
            return self.drawn - rollout * self.batch >= ahead
        place = rollout % max(1, self.length // self.batch) * self.batch
        distance = (self.drawn - place) % self.length
        return min(ahead, self.length // 2) <= distance < self.length - min(ahead, self.length // 4)

    def _read(self, start: int) -> Iterator[Any]:
        while True:
            count = 0
            for count, row in enumerate(self.dataset, 1):
                if count > start:
                    yield row
            if count == 0:
                raise DataError("The data set has no rows to draw further prompts from.")
            self.length, start = count, 0
            self._ends += 1

    def state_dict(self) -> dict[str, int | None]:
        """Return where the stream is."""
        return {"drawn": self.drawn, "length": self.length}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Continue where `state_dict` was taken, with the same data set and seed."""
        self.drawn, self._rows = int(state["drawn"] or 0), None
        if not hasattr(self.dataset, "__len__"):
            self.length = state.get("length")


# ---------------------------------------------------------------------------------------------------------------------
# Groups put into a rollout batch, in the place of some of its own.


def write_groups_into_batch(
    batch: Mapping[str, Any],
    replacements: Mapping[int, Group],
    placement: Placement,
    *,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    signals: RolloutSignals | None = None,
    gather: Gather | None = None,
) -> tuple[dict[str, Any], RolloutSignals | None]:
    """Return the batch and its signals with other groups in the place of some; the arguments are not changed.

    The local batch is padded to the longest prompt and completion in it, and keeps its structure: what it does not
    have (reference log-probabilities, say) is not brought in. Two exceptions, because such batches may be mixed: image
    inputs, and `old_per_token_logps`, which are NaN for rows that come without and then are to be taken from the first
    training pass. `num_items_in_batch` is not corrected; see `correct_num_items`. If any group has to go to another
    process, all of them call `gather` once.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them, with advantages (N,).
        replacements: number of a group of the batch -> the group that takes its place; the same on every process. It
            may come from a buffer or from another batch.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a group has another number of completions or lacks what the batch has, or `gather` is missing.
    """
    rows = Rows.of_batch(batch, signals)
    if batch["advantages"].ndim != 1:
        raise DataError(
            f"The batch has advantages of shape {tuple(batch['advantages'].shape)}: replace groups while there is one "
            "advantage per completion, before credit is spread over tokens."
        )
    parts, source = [rows], list(range(len(rows)))
    for target, group in _brought(replacements, placement, gather).items():
        here = placement.here(target)
        first = sum(map(len, parts))
        parts.append(group.take([index for _, index in here]))
        for position, (row, _) in enumerate(here):
            source[row] = first + position
    if len(parts) == 1:
        return dict(batch), signals
    joined = join_rows(parts, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of).take(source)
    return joined.into_batch(batch), joined.signals()


def _brought(replacements: Mapping[int, Group], placement: Placement, gather: Gather | None) -> dict[int, Rows]:
    """The rows of the groups of which this process needs some, with their advantages."""
    placement.check(replacements)
    for group in replacements.values():
        if len(group.advantages) != placement.num_generations:
            raise DataError(
                f"A group has {len(group.advantages)} completions, but num_generations is "
                f"{placement.num_generations}: continue with the same, or start with an empty replay buffer."
            )
    travelling = {
        target: group
        for target, group in replacements.items()
        if any(process != group.holder for process in placement.holders(target))
    }
    arrived: dict[int, Rows | None] = {target: group.rows for target, group in replacements.items()}
    if travelling:
        sent = [(target, group.rows) for target, group in travelling.items() if group.holder == placement.process_index]
        arrived |= dict(checked(gather)(sent))
    brought = {}
    for target, group in replacements.items():
        if placement.here(target):
            rows = arrived[target]
            if rows is None:
                raise DataError("A group to be put into the batch has no rows on the process that holds it.")
            brought[target] = replace(rows, columns={**rows.columns, "advantages": group.advantages})
    return brought


def correct_num_items(batch: Mapping[str, Any], gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the batch with `num_items_in_batch` counted anew, as TRL counts it: valid tokens of all processes.

    Args:
        gather: returns a number of each process as one tensor, as accelerate's function of this name does; called once.
    """
    return {**batch, "num_items_in_batch": gather(valid_tokens(batch).sum()).sum()}


# ---------------------------------------------------------------------------------------------------------------------
# A buffer of groups that had a gradient, to take the place of groups that have none.


@dataclass(frozen=True, eq=False)
class _Entry:
    number: int  # in the order of being added
    priority: float
    group: Group


class ReplayBuffer:
    """Keeps the groups of highest priority and draws from them.

    The priority of a group is the sum of |advantage| times the standard deviation of its rewards. A group that is dead
    or whose mean reward is too low does not enter. When the buffer is full the group of lowest priority leaves, of
    equal ones the oldest, so that a new group takes the place of an old one of the same priority.

    With several processes each has a buffer that knows all groups, adds and draws the same ones (as long as it is
    called with the same arguments everywhere) and has the rows of those groups that the process is the holder of.

    Args:
        size: groups to keep at most, at least 1.
        min_reward: mean reward that a group needs to enter. None: any.
        variance_epsilon: when a group is dead, see `dead_groups`; at least 0.
        max_age: steps after which a group leaves, at least 1. None: never.
        seed: of what is drawn.
        estimator: of the groups' advantages.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        size: int,
        *,
        min_reward: float | None = None,
        variance_epsilon: float = 1e-6,
        max_age: int | None = None,
        seed: int = 0,
        estimator: str = "grpo",
    ) -> None:
        for name, value in (("size", size), ("max_age", max_age)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} of the replay buffer is {value!r}: give an integer of at least 1.")
        if min_reward is not None and not is_number(min_reward):
            raise ConfigError(f"min_reward of the replay buffer is {min_reward!r}: give a finite number, or None.")
        if not (is_number(variance_epsilon) and variance_epsilon >= 0):
            raise ConfigError(f"variance_epsilon is {variance_epsilon!r}: give a number of at least 0.")
        self.size, self.min_reward, self.variance_epsilon = size, min_reward, variance_epsilon
        self.max_age, self.estimator = max_age, estimator
        self.step = 0
        self._added = 0
        self._entries: list[_Entry] = []  # oldest first
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def megabytes(self) -> float:
        """Millions of bytes that the rows on this process take, each prompt's images counted once."""
        return sum(entry.group.nbytes for entry in self._entries) / 1e6

    @property
    def mean_age(self) -> float:
        """Steps since the groups were generated, on average; 0 for an empty buffer."""
        ages = [self.step - entry.group.step for entry in self._entries]
        return sum(ages) / len(ages) if ages else 0.0

    def advance(self, step: int) -> None:
        """Say that `step` is the global step; groups older than `max_age` leave."""
        self.step = step
        if self.max_age is not None:
            self._entries = [entry for entry in self._entries if step - entry.group.step <= self.max_age]

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each of the groups would enter by itself; cheaper than making them.

        Args:
            advantages: (num_groups, G).
            rewards: weighted sums, (num_groups, G).
        """
        return [value is not None for value in self._admitted(advantages, rewards)]

    def _admitted(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[float | None]:
        """The priorities of the groups that would enter, None for the others; (num_groups, G) each."""
        values = priority(advantages, rewards)
        found = signal(advantages.flatten(), rewards.flatten(), rewards.size(-1), estimator=self.estimator)
        enters = (found > self.variance_epsilon) & values.isfinite()
        if self.min_reward is not None:
            enters &= rewards.double().nanmean(dim=-1) >= self.min_reward
        if len(self) >= self.size:
            enters &= values >= min(entry.priority for entry in self._entries)
        return [value if one else None for value, one in zip(values.tolist(), enters.tolist(), strict=True)]

    def add(self, group: Group) -> bool:
        """Add a group, unless it is not admitted; return whether it was."""
        (value,) = self._admitted(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))
        if value is None:
            return False
        self._entries.append(_Entry(self._added, value, group))
        self._added += 1
        self.step = max(self.step, group.step)
        self._keep_best()
        return True

    def _keep_best(self) -> None:
        while len(self) > self.size:
            self._entries.remove(min(self._entries, key=lambda entry: (entry.priority, entry.number)))

    def sample(self, count: int) -> list[Group]:
        """Draw `count` different groups, each with probability proportional to its priority among those left.

        Groups of priority 0 are drawn, with equal probabilities, when no others are left. All stay in the buffer.

        Args:
            count: at least 0; where it is more than there are, all are returned.
        """
        if count < 0:
            raise ConfigError(f"{count} groups are to be drawn from the replay buffer: give a number of at least 0.")
        draws = torch.rand(len(self), generator=self._generator, dtype=torch.float64).tolist()
        # The largest u ** (1 / priority) are a draw without replacement (Efraimidis and Spirakis, 2006); in logarithms.
        keys = [
            (1, math.log(draw or 5e-324) / entry.priority) if entry.priority > 0 else (0, draw)
            for draw, entry in zip(draws, self._entries, strict=True)
        ]
        order = sorted(range(len(self)), key=lambda index: keys[index], reverse=True)
        return [self._entries[index].group for index in order[:count]]

    def state_dict(self) -> dict[str, Any]:
        """Return what this process has, as tensors, numbers, lists and dictionaries (for `torch.save`)."""
        return {
            "step": self.step,
            "estimator": self.estimator,
            "added": self._added,
            "generator": self._generator.get_state(),
            "numbers": [entry.number for entry in self._entries],
            "groups": [entry.group.state_dict() for entry in self._entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the options of this buffer hold for the groups too.

        For another number of processes see `merge_states` and `split_state`.
        """
        self.step, self._added = state["step"], state["added"]
        self._generator.set_state(state["generator"])
        self._entries = []
        for number, saved in zip(state["numbers"], state["groups"], strict=True):
            group = Group.from_state(saved)
            (value,) = self._admitted(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))
            if value is not None:
                self._entries.append(_Entry(number, value, group))
                self._keep_best()
        self.advance(self.step)


def priority(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the sum of |advantages| (num_groups, G) times the deviation of the rewards, (num_groups,) float64."""
    return advantages.double().abs().sum(dim=-1) * group_std(rewards.flatten(), rewards.size(-1))


# ---------------------------------------------------------------------------------------------------------------------
# Dynamic sampling: further prompts take the place of those whose completions carry no gradient.
#
# DAPO (https://huggingface.co/papers/2503.14476) generates until the batch is full of groups with a gradient; here
# the
# number of rounds is limited. Everything is counted in groups and is the same on every process.


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


# ---------------------------------------------------------------------------------------------------------------------
# Prompts beyond those of a trainer's rollout batch: which come next, and none that the batch has already.


class FurtherPrompts:
    """Draws prompts for further rounds of rollout batches, the same on every process."""

    def __init__(self, host: Host, dataset: Dataset | IterableDataset, shuffles: bool) -> None:
        self.host, args = host, host.args
        self.dataset, self.shuffles = dataset, shuffles
        self._streamed = isinstance(dataset, IterableDataset)
        if self._streamed and shuffles:
            dataset = dataset.shuffle(seed=args.seed)  # the order in which TRL reads it
        self.stream = PromptStream(dataset, args.seed, batch=args.prompts_per_rollout, order=lru_cache(3)(self._order))
        self._taken: set[str] = set()
        self._of_step = (-1, 0)  # global step, rollouts in it so far

    def _order(self, epoch: int) -> list[int]:
        """Numbers of the rows that TRL draws in an epoch, which drops those that fill no batch."""
        sampler = RepeatSampler(self.dataset, 1, self.stream.batch, shuffle=self.shuffles, seed=self.host.args.seed)
        for _ in range(epoch):
            next(iter(sampler), None)
        return list(sampler)

    def count_rollout(self) -> None:
        """Say that a rollout batch has been generated; a step may take several."""
        step = self.host.state.global_step
        self._of_step = (step, self._of_step[1] + 1 if step == self._of_step[0] else 1)

    def _rollout(self) -> int:
        """Rollouts of the run before the one at hand."""
        args, state = self.host.args, self.host.state
        passes = int(args.steps_per_generation or 1) * args.num_iterations
        if self._streamed:  # its epochs are of unknown length
            before = state.global_step * args.gradient_accumulation_steps
        else:
            before = round((state.epoch or 0.0) * (len(self.dataset) // self.stream.batch) * passes)
        return -(-before // passes) + self._of_step[1] - 1

    def begin(self, rows: Sequence[Mapping[str, Any]], placement: Placement) -> None:
        """Take in the prompts of a batch, which no further round draws again."""
        firsts = [row for group in range(placement.num_groups) for row, place in placement.here(group) if place == 0]
        self._taken = set(gather_object([prompt_key(rows[row]) for row in firsts]))

    def draw(self, missing: int, placement: Placement) -> tuple[list[dict[str, Any]], int]:
        """Return this process's rows of a round, and how many prompts it has; none where the data has no more."""
        size = placement.num_generations, placement.num_processes
        prompts = self.stream.draw(prompts_of_round(missing, *size), self._rollout(), self._take)
        count = len(prompts) // prompts_of_round(1, *size) * prompts_of_round(1, *size)
        return rows_of_process(prompts[:count], size[0], placement.process_index, size[1]), count

    def _take(self, row: Mapping[str, Any]) -> bool:
        key = prompt_key(row)
        new = key not in self._taken
        self._taken.add(key)
        return new


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows with the same prompt and the same images."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Mapping):
            value = [part for item in sorted(value.items()) for part in item]
        if isinstance(value, list | tuple):
            digest.update(f"[{len(value)}]".encode())
            for part in value:
                feed(part)
        else:
            content = value.tobytes() if hasattr(value, "tobytes") else value
            content = content if isinstance(content, bytes) else repr(content).encode()
            digest.update(f"{len(content)}:".encode() + content)

    feed([row["prompt"], images_of(row)])
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The baseline of ReMax: what one greedy completion of each prompt earns.


def greedy_baseline(rollout: Rollout, host: Host, placement: Placement) -> torch.Tensor:
    """Return the reward of one greedy completion per prompt, (num_groups,), the same on every process.

    The process with a prompt's first completion generates it. Rewards that compare a group count as 0. Every process
    generates equally often and equally much; nothing of it is logged.
    """
    firsts = [
        [group for group in range(placement.num_groups) if placement.holder(group) == process]
        for process in range(placement.num_processes)
    ]
    most = max(map(len, firsts))
    mine = [group * placement.num_generations - placement.process_index * placement.rows
            for group in firsts[placement.process_index]]  # fmt: skip
    rows = mine + [0] * (most - len(mine))  # others generate too, so that all make the same collective calls
    assert rollout.messages is not None
    earned = host.earn_greedily([rollout.rows[row] for row in rows], [rollout.messages[row] for row in rows])
    sums = weighted_sums(earned, host.reward_weights).nan_to_num().view(placement.num_processes, most)
    return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])


# ---------------------------------------------------------------------------------------------------------------------
# The replay buffer of a trainer: what is drawn, what enters and when, what is logged and saved of it.


logger = logging.get_logger(__name__)

OLD_LOGPS = "old_per_token_logps"
_MEASURED = (OLD_LOGPS, "signals.entropies")  # NaN where no pass measured them


class Replay:
    """Groups of earlier rollout batches, which take the place of dead ones.

    Where neither TRL nor a measurement has scored a rollout batch, its groups wait for the first training pass over
    them, which knows the log-probabilities of the policy that generated them.
    """

    def __init__(self, host: Host, wanted: Wanted) -> None:
        self.host, self.wanted, args = host, wanted, host.args
        self.buffer = ReplayBuffer(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )
        self._waiting: dict[int, Group] = {}
        self._waiting_placement: Placement | None = None
        self._first_logps: torch.Tensor | None = None
        self._rows_seen = 0

    def draw(self, count: int) -> list[Group]:
        """Return up to `count` groups for the batch at hand; those that have become too old leave before."""
        self.buffer.advance(self.host.state.global_step)
        return self.buffer.sample(count)

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each group of a batch would enter by itself.

        Args:
            advantages: (N of all,).
            rewards: (N of all,), weighted sums.
        """
        size = int(self.host.args.num_generations or 1)
        return self.buffer.admits(*(value.cpu().view(-1, size) for value in (advantages, rewards)))

    def keep(self, groups: Mapping[int, Group], placement: Placement, scored: bool) -> None:
        """Put groups into the buffer, or let them wait for the first training pass over them.

        Args:
            groups: number in the batch that is trained on -> group.
            scored: whether their log-probabilities came with them, from TRL or from the measurement.
        """
        if scored:
            for group in groups.values():
                self.buffer.add(_with_measured_logps(group))
        else:
            self._waiting, self._waiting_placement = dict(groups), placement
            self._first_logps, self._rows_seen = None, 0

    @property
    def waits(self) -> bool:
        """Whether groups wait."""
        return bool(self._waiting)

    def numbered(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch such that `first_pass` knows its rows again, if groups of it wait."""
        if not self._waiting:
            return batch
        return {**batch, "rollout_row": torch.arange(len(batch["prompt_ids"]))}

    def rows_read(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rows of a micro-batch whose groups wait for its log-probabilities, (N,) bool; None: no row's."""
        if not self._waiting or self._waiting_placement is None:
            return None
        waiting = torch.zeros(self._waiting_placement.rows, dtype=torch.bool)
        for group in self._waiting:
            waiting[[row for row, _ in self._waiting_placement.here(group)]] = True
        return waiting[inputs["rollout_row"].cpu()]

    def first_pass(self, passed: TrainingPass) -> None:
        """Take the log-probabilities (N, T) of the first training pass for those of the policy that generated.

        They complete the groups that wait to enter the buffer; one of which they are NaN does not enter.
        """
        inputs, logps = passed.inputs, passed.logps
        assert logps is not None
        if not self._waiting or self._waiting_placement is None:
            return
        if self._first_logps is None:
            self._first_logps = logps.new_zeros(self._waiting_placement.rows, logps.size(1))
        self._first_logps[inputs["rollout_row"]] = logps.detach()
        self._rows_seen += len(logps)
        if self._rows_seen == self._waiting_placement.rows:
            known = with_old_logps(self._waiting, self._first_logps, self._waiting_placement, gather_object)
            undefined = self._undefined(self._first_logps, self._waiting_placement)
            for number, group in known.items():
                if not undefined[number]:
                    self.buffer.add(group)
            self._waiting, self._first_logps = {}, None

    def _undefined(self, logps: torch.Tensor, placement: Placement) -> list[bool]:
        """Whether each group of the batch, whose rows here have `logps`, has any that is NaN."""
        counts = torch.zeros(placement.num_groups, device=logps.device)
        for group in self._waiting:
            counts[group] = logps[[row for row, _ in placement.here(group)]].isnan().sum()
        return [count > 0 for count in self.host.accelerator.reduce(counts, reduction="sum").tolist()]

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return what is logged of the buffer, the same on every process, which all call it.

        Args:
            replaced_fraction: groups of the batch that came from the buffer, of all.
        """
        accelerator = self.host.accelerator
        megabytes = accelerator.gather(torch.tensor([self.buffer.megabytes], device=accelerator.device))
        return {
            "replay/size": len(self.buffer),
            "replay/megabytes": megabytes.sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": self.buffer.mean_age,
        }

    def load(self, states: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Continue with the buffer that the processes of a run have saved, as many as they were.

        It starts empty, with a warning, if its groups cannot be trained on with the options of this run.
        """
        accelerator = self.host.accelerator
        merged = merge_states(states)
        reason = why_unusable(merged, self.host, self.wanted)
        if reason is None:
            self.buffer.load_state_dict(split_state(merged, accelerator.process_index, accelerator.num_processes))
        elif accelerator.is_main_process:
            logger.warning(f"The replay buffer of {folder} starts empty: {reason}.")


def why_unusable(state: Mapping[str, Any], host: Host, wanted: Wanted) -> str | None:
    """Return why the groups of a saved buffer cannot be trained on with the options of a trainer, None if they can."""
    args, needed = host.args, _needed_columns(host, wanted)
    if state.get("estimator", args.advantage_estimator) != args.advantage_estimator:
        return f"advantage_estimator is {args.advantage_estimator}, and was {state['estimator']}"
    for group in state["groups"]:
        if (size := len(group["advantages"])) != args.num_generations:
            return f"num_generations is {args.num_generations}, and its groups have {size} completions"
        rows = group["rows"]
        for name, option in needed.items():
            if name not in rows["columns"] or (name in _MEASURED and bool(rows["columns"][name].isnan().all())):
                return f"its groups have no {name}, which {option} needs"
        if args.uses_perception_loss and any(row and "perturbed_pixel_values" not in row for row in rows["images"]):
            return "its groups have no perturbed_pixel_values, which perception_loss_weight or der_loss_weight2 needs"
    return None


def _needed_columns(host: Host, wanted: Wanted) -> dict[str, str]:
    """What the batches of a run have and groups put into them cannot be without -> the option it is there for."""
    args = host.args
    needed = {OLD_LOGPS: "replay_buffer_size"}
    if args.beta != 0:
        needed["ref_per_token_logps"] = "beta"
    if args.kl_coef > 0:
        needed["ref_per_token_logps"] = "kl_coef"
    if args.has_kl_loss and args.kl_penalty == "full":
        needed["reference_hidden"] = "kl_penalty full"
    if args.use_vllm and args.vllm_importance_sampling_correction:
        needed |= dict.fromkeys(("importance_sampling_ratio", "sampling_per_token_logps"), "vLLM")
    for name, options in (
        ("signals.attention.vision", wanted.attention),
        ("signals.entropies", wanted.entropies),
        ("signals.similarity", wanted.similarity),
        ("signals.dependency", wanted.dependency),
    ):
        if options:
            needed[name] = options[0]
    for rule, needs in active_rules(args).items():
        for need in needs:
            if need == "views":
                needed |= {f"{VIEWS}{name}": rule for name in args.perturbations}
            elif need.startswith(VIEW):
                needed[f"{VIEWS}{need.removeprefix(VIEW)}"] = rule
            elif not is_measurement(need):
                needed[f"{EXTRA}{short_name(need)}"] = rule
    return needed


def _with_measured_logps(group: Group) -> Group:
    if group.rows is None or OLD_LOGPS in group.rows.columns:
        return group
    columns = {**group.rows.columns, OLD_LOGPS: group.rows.columns["signals.logps"]}
    return replace(group, rows=replace(group.rows, columns=columns))


# ---------------------------------------------------------------------------------------------------------------------
# Which groups are trained on: advantages by estimator, then dead groups replaced by fresh or replayed ones.


class GroupChoice:
    """Replaces dead groups of rollout batches, and keeps what replay and resampling need over steps."""

    def __init__(self, host: Host, wanted: Wanted, prompts: FurtherPrompts | None) -> None:
        self.host, self.args, self.wanted = host, host.args, wanted
        self.replay = Replay(host, wanted) if self.args.replay_buffer_size > 0 else None
        self.prompts = prompts
        self.streak = DeadStreak(self.args)
        self._quantiles: tuple[float, float] | None = None  # of the rollout at hand
        self._size = int(self.args.num_generations or 1)  # completions per prompt

    # One rollout batch

    def choose(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, some of its groups replaced, and metrics."""
        self._quantiles = None
        verdict = self.judge(rollout)
        if not self.args.selects_groups:
            self._warn_of_dead_streak(len(verdict.live))
            return replace(rollout, live=verdict.live_rows()), {}
        rounds = [rollout]
        fresh, metrics = self._resample(rounds)
        self._warn_of_dead_streak(len(verdict.live) + len(fresh))
        missing = [group for group in verdict.dead if group not in fresh]
        replayed = {} if self.replay is None else dict(zip(missing, self.replay.draw(len(missing)), strict=False))
        if self.args.advantage_estimator == "reinforce_plus_plus":
            fresh = self._with_one_deviation(rounds, fresh, replayed)
        replacements = fresh | replayed
        if self.replay is not None:
            self._keep(rollout, fresh, self.replay)
        chosen, signals = rollout.batch, rollout.signals
        if replacements:
            chosen, signals = write_groups_into_batch(
                chosen,
                replacements,
                verdict.placement,
                pad_token_id=self.host.tokenizer.pad_token_id,
                pad_to_multiple_of=self.host.pad_to_multiple_of,
                signals=signals,
                gather=gather_object,
            )
            chosen = correct_num_items(chosen, self.host.accelerator.gather)
        if self.replay is not None:
            chosen = self.replay.numbered(chosen)
            metrics |= self.replay.metrics(len(replayed) / verdict.placement.num_groups)
        metrics["sampling/live_fraction"] = (len(verdict.live) + len(replacements)) / verdict.placement.num_groups
        live = verdict.live_rows(replacements)
        # A filtered group that nothing replaces has rewards that differ; without this it would be trained on.
        chosen = {**chosen, "advantages": chosen["advantages"] * live.to(chosen["advantages"].device)}
        return replace(rollout, batch=chosen, signals=signals, live=live, replaced=sorted(replacements)), metrics

    def judge(self, rollout: Rollout) -> Verdict:
        """Find advantages by the estimator and the dead groups; correct the advantages of the rollout and the table."""
        host, args = self.host, self.args
        accelerator, size = host.accelerator, self._size
        placement = Placement(
            len(rollout.batch["prompt_ids"]), size, accelerator.process_index, accelerator.num_processes
        )
        assert rollout.rewards is not None
        verdict = Verdict(
            placement,
            rewards=weighted_sums(rollout.rewards, host.reward_weights),
            advantages=accelerator.gather(rollout.batch["advantages"]),
        )
        if args.uses_critic:
            of_tokens = rollout.batch["token_advantages"].nan_to_num()  # (N, T)
            verdict.advantages = accelerator.gather(masked_mean(of_tokens, valid_tokens(rollout.batch)).squeeze(1))
        elif args.advantage_estimator != "grpo":
            baseline = greedy_baseline(rollout, host, placement) if args.advantage_estimator == "remax" else None
            verdict.advantages = estimate_advantages(verdict.rewards, size, args.advantage_estimator, baseline)
        if args.advantage_estimator != "grpo":
            rollout.batch = {**rollout.batch, "advantages": verdict.advantages[verdict.here]}
            host.correct_logged_advantages(verdict.advantages.tolist())
        dead: list[int] = []
        if not args.uses_critic:
            epsilon, estimator = args.replay_var_epsilon, args.advantage_estimator
            dead = dead_groups(verdict.advantages, verdict.rewards, size, estimator=estimator, epsilon=epsilon)
        filtered: list[int] = []
        means = torch.empty(0)
        if args.online_filtering:
            compared = filter_rewards(args.filter_key, host.reward_names, rollout.rewards, verdict.rewards)
            filtered = self._outside(compared)
            means = group_means(compared, size)
        self.streak.add(placement.num_groups, dead, filtered, means.tolist())
        verdict.filtered = sorted(set(filtered).difference(dead))
        verdict.dead = sorted({*dead, *filtered})
        rollout.verdict = verdict
        return verdict

    def _outside(self, compared: torch.Tensor) -> list[int]:
        """Numbers of the groups that online filtering leaves out; quantiles are those of the first round."""
        low, high, quantile = self.args.filter_low, self.args.filter_high, self.args.filter_mode == "quantile"
        if quantile:
            if self._quantiles is None:
                self._quantiles = quantile_bounds(compared, self._size, low=low, high=high)
            low, high = self._quantiles
        return filtered_groups(compared, self._size, low=low, high=high, inclusive=quantile)

    def _warn_of_dead_streak(self, live: int) -> None:
        sentence = self.streak.end_rollout(self.host.state.global_step, live)
        if sentence is not None and self.host.accelerator.is_main_process:
            logger.warning(sentence)

    def _with_one_deviation(
        self, rounds: list[Rollout], fresh: dict[int, Group], replayed: Iterable[int]
    ) -> dict[int, Group]:
        """Divide all advantages by the deviation over what is trained on; return the fresh groups with theirs.

        Replayed groups keep theirs, and a filtered group that nothing replaces is not trained on.
        """
        verdicts, size = [_verdict(rollout) for rollout in rounds], self._size
        verdict = verdicts[0]
        own = torch.ones(verdict.placement.num_groups, dtype=torch.bool, device=verdict.rewards.device)
        own[[*verdict.filtered, *fresh, *replayed]] = False
        of_fresh = [group.rewards.to(verdict.rewards) for group in fresh.values()]
        trained = torch.cat([verdict.rewards.view(-1, size)[own].flatten(), *of_fresh])

        def divided(rewards: torch.Tensor) -> torch.Tensor:
            return estimate_advantages(rewards, size, "reinforce_plus_plus", trained=trained.to(rewards.device))

        for found in verdicts:
            found.advantages = divided(found.rewards)
        rounds[0].batch = {**rounds[0].batch, "advantages": verdict.advantages[verdict.here]}
        self.host.correct_logged_advantages([value for found in verdicts for value in found.advantages.tolist()])
        return {place: replace(group, advantages=divided(group.rewards)) for place, group in fresh.items()}

    def _resample(self, rounds: list[Rollout]) -> tuple[dict[int, Group], dict[str, float]]:
        """Groups of further prompts, by the number of the dead group whose place they take; add to the `rounds`."""
        if self.prompts is None:
            return {}, {}
        self.prompts.count_rollout()
        rollout, verdict = rounds[0], _verdict(rounds[0])
        plan = Resampling(list(verdict.dead), self.args.dynamic_sampling_max_rounds)
        replacements: dict[int, Group] = {}
        if plan.wants_more:
            self.prompts.begin(rollout.rows, verdict.placement)
        with self.host.as_one_batch(verdict.placement.rows) as completions:
            while plan.wants_more:
                rows, count = self.prompts.draw(len(plan.missing), verdict.placement)
                if not rows:
                    break
                completions.append(len(rows))
                rounds.append(further := self.host.judge(rows, self.judge))
                places = plan.take(_verdict(further).live, count)
                groups = self._groups(further, list(places.values()))
                replacements |= dict(zip(places, groups, strict=True))
        return replacements, {
            "dynamic_sampling/rounds": plan.rounds,
            "dynamic_sampling/generated_groups": plan.generated,
            "dynamic_sampling/discarded_groups": plan.discarded,
        }

    def _groups(self, rollout: Rollout, wanted: list[int]) -> list[Group]:
        verdict = _verdict(rollout)
        return groups_from_batch(
            rollout.batch,
            wanted,
            verdict.placement,
            advantages=verdict.advantages,
            rewards=verdict.rewards,
            pad_token_id=self.host.tokenizer.pad_token_id,
            step=self.host.state.global_step,
            signals=rollout.signals,
            gather=gather_object,
        )

    def _keep(self, rollout: Rollout, fresh: dict[int, Group], replay: Replay) -> None:
        """Give the live groups and the fresh ones to the buffer."""
        verdict = _verdict(rollout)
        admitted = replay.admits(verdict.advantages, verdict.rewards)
        wanted = [group for group in verdict.live if admitted[group]]
        groups = dict(zip(wanted, self._groups(rollout, wanted), strict=True)) | fresh
        measured = rollout.signals is not None and self.wanted.head
        replay.keep(groups, verdict.placement, scored=measured or OLD_LOGPS in rollout.batch)

    # What is saved

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, whole or not at all."""
        accelerator = self.host.accelerator
        if self.replay is not None or self.prompts is not None:
            state = {
                "buffer": None if self.replay is None else self.replay.buffer.state_dict(),
                "prompts": None if self.prompts is None else self.prompts.stream.state_dict(),
            }
            save_share(state, folder, accelerator.process_index, accelerator.num_processes, "choice")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, which another number of processes may have written."""
        if self.replay is None and self.prompts is None:
            return
        shares = load_shares(folder, "choice")
        buffers = [share["buffer"] for share in shares if share["buffer"] is not None]
        positions = [share["prompts"] for share in shares if share["prompts"] is not None]
        if self.replay is not None:
            if buffers:
                self.replay.load(buffers, folder)
            else:
                logger.warning(_starts_anew(folder, "replay buffer", "replay_buffer_size"))
        if self.prompts is not None:
            if positions:
                self.prompts.stream.load_state_dict(positions[0])
            else:
                logger.warning(_starts_anew(folder, "position in the prompts", "dynamic_sampling"))


def _verdict(rollout: Rollout) -> Verdict:
    assert rollout.verdict is not None
    return rollout.verdict


def _starts_anew(folder: Path, what: str, option: str) -> str:
    return f"{folder} has no {what}, which starts anew: the checkpoint was written without {option}."
