"""Which groups are trained on: zero-variance groups, online filtering, dynamic sampling, replay buffer.

All tensors about groups are of all processes, prompt-major, so that every process finds the same groups.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers.utils import logging

from vgr_trl.advantages import estimate_advantages
from vgr_trl.batch import Placement, Rows, join_rows, valid_tokens
from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.credit import active_rules, masked_mean
from vgr_trl.data.images import images_of
from vgr_trl.data.rows import ReadOnce, pop_replaced, reads_alike
from vgr_trl.patches import as_one_batch, replace_newest
from vgr_trl.registries import short_name
from vgr_trl.rollout import GroupSelection, Rollout, weighted_sums
from vgr_trl.signals.named import RolloutSignals, columns_of_signals, signals_of_columns
from vgr_trl.utils import ConfigError

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)

OLD_LOGPS = "old_per_token_logps"


# One rollout batch, top to bottom


def select_groups(trainer: "DAPOTrainer", rollout: Rollout) -> dict[str, float]:
    """Replace zero-variance groups of a rollout by further or replayed ones, where that is on; return metrics."""
    args, replay, metrics = trainer.args, trainer.replay, dict[str, float]()
    selection = find_zero_variance(trainer, rollout)
    rounds, chosen = [rollout], dict[int, tuple[Rollout, int]]()
    if args.dynamic_sampling == "resample":
        chosen, metrics = resample(trainer, rounds)
    trained = len(selection.kept) + len(chosen)
    sentence = trainer.zero_variance_streak.end_rollout(trainer.state.global_step, trained)
    if sentence is not None and trainer.accelerator.is_main_process:
        logger.warning(sentence)
    if not trainer.selects_groups:
        rollout.with_gradient = selection.rows_with_gradient()
        return {}
    missing = [group for group in selection.dropped if group not in chosen]
    replayed = {} if replay is None else dict(zip(missing, replay.draw(len(missing)), strict=False))
    is_of_batch = args.advantage_estimator == "grpo" and trainer.scale_rewards == "batch"
    if args.advantage_estimator == "reinforce_plus_plus" or (
        is_of_batch and (chosen or replayed or selection.filtered)
    ):
        replayed = divide_by_one_deviation(trainer, rounds, chosen, replayed)
    fresh = {place: _groups(trainer, source, [number])[0] for place, (source, number) in chosen.items()}
    if replay is not None:
        fresh = {place: _with_measured_logps(group) for place, group in fresh.items()}
    replacements = fresh | replayed
    if replay is not None:
        replay.keep(trainer, rollout, fresh)
    if replacements:
        batch = rollout.batch
        if (
            replayed and OLD_LOGPS not in batch and rollout.signals is not None
        ):  # TRL leaves out those of on-policy rows
            batch = {**batch, OLD_LOGPS: rollout.signals.logps}
        rollout.batch, rollout.signals = insert_groups(
            batch,
            replacements,
            selection.placement,
            pad_token_id=trainer._tokenizer.pad_token_id,
            pad_to_multiple_of=trainer.pad_to_multiple_of or None,
            signals=rollout.signals,
        )
        rollout.batch = correct_num_items(rollout.batch, trainer.accelerator.gather)
    num_groups = selection.placement.num_groups
    if replay is not None:
        metrics |= replay.metrics(len(replayed) / num_groups)
    metrics["sampling/nonzero_variance_fraction"] = (trained + len(replayed)) / num_groups
    rollout.with_gradient, rollout.replaced = selection.rows_with_gradient(replacements), sorted(replacements)
    # A filtered group that nothing replaces has rewards that differ; without this it would be trained on.
    advantages = rollout.batch["advantages"]
    rollout.batch = {**rollout.batch, "advantages": advantages * rollout.with_gradient.to(advantages.device)}
    return metrics


def find_zero_variance(
    trainer: "DAPOTrainer", rollout: Rollout, bounds: tuple[float, float] | None = None
) -> GroupSelection:
    """Find advantages by the estimator and the groups without a gradient; correct the advantages of batch and table.

    Args:
        bounds: quantiles of online filtering, those of the first round.
    """
    args, accelerator, size = trainer.args, trainer.accelerator, int(trainer.args.num_generations or 1)
    rows = len(rollout.batch["prompt_ids"])
    placement = Placement(rows, size, accelerator.process_index, accelerator.num_processes)
    assert rollout.rewards is not None
    rewards = weighted_sums(rollout.rewards, trainer.reward_weights)
    tasks = rollout.rewards[:, :-1] if args.penalises_kl else rollout.rewards
    task_rewards = weighted_sums(tasks, trainer.reward_weights[: tasks.size(1)])
    selection = GroupSelection(placement, rewards, task_rewards, accelerator.gather(rollout.batch["advantages"]))
    zero_variance, baseline = list[int](), None
    if trainer.critic is not None:
        of_tokens = rollout.batch["token_advantages"].nan_to_num()  # (N, T)
        selection.advantages = accelerator.gather(masked_mean(of_tokens, valid_tokens(rollout.batch)).squeeze(1))
    elif args.advantage_estimator != "grpo":
        if args.advantage_estimator == "remax":
            baseline = greedy_baseline(trainer, rollout, placement)
        selection.advantages = estimate_advantages(rewards, size, args.advantage_estimator, baseline)
    if args.advantage_estimator != "grpo":
        rollout.batch = {**rollout.batch, "advantages": selection.local_advantages}
        replace_newest(trainer._logs["advantages"], selection.advantages.tolist())
    if trainer.critic is None:
        estimator, epsilon, advantages = args.advantage_estimator, args.replay_var_epsilon, selection.advantages
        if args.penalises_kl:  # its differences within a group say nothing about the task
            advantages = estimate_advantages(task_rewards, size, estimator, baseline)
        zero_variance = zero_variance_groups(advantages, task_rewards, size, estimator=estimator, epsilon=epsilon)
    filtered: list[int] = []
    if args.online_filtering:
        index = filter_index(args.filter_key, trainer.reward_func_names)
        compared = task_rewards if index is None else rollout.rewards[:, index]
        selection.bounds = bounds or (args.filter_low, args.filter_high)
        if args.filter_mode == "quantile" and bounds is None:
            selection.bounds = quantile_bounds(compared, size, low=args.filter_low, high=args.filter_high)
        low, high = selection.bounds
        inclusive = args.filter_mode == "quantile"
        filtered = filtered_groups(compared, size, low=low, high=high, inclusive=inclusive)
    selection.filtered = sorted(set(filtered).difference(zero_variance))
    trainer.zero_variance_streak.add(placement.num_groups, len(zero_variance), len(selection.filtered))
    selection.dropped = sorted({*zero_variance, *filtered})
    rollout.selection = selection
    return selection


def resample(trainer: "DAPOTrainer", rounds: list[Rollout]) -> tuple[dict[int, tuple[Rollout, int]], dict[str, float]]:
    """Generate for further prompts; return rollout and number of the group that takes each place, and metrics.

    The rollouts are added to `rounds`.

    DAPO (https://huggingface.co/papers/2503.14476) generates until the batch is full of groups with a gradient; here
    the number of rounds is limited.
    """
    prompts, first = trainer.further_prompts, _selection(rounds[0])
    assert prompts is not None
    missing, chosen, generated = list(first.dropped), dict[int, tuple[Rollout, int]](), 0
    if missing:
        prompts.begin(rounds[0].rows, first.placement)
    with as_one_batch(trainer, first.placement.rows) as completions:
        while missing and len(rounds) <= trainer.args.dynamic_sampling_max_rounds:
            rows, count = prompts.draw(len(missing), first.placement)
            if not rows:
                break
            completions.append(len(rows))
            with trainer.new_rollout(rows) as further:
                trainer.generate_and_score(further)
                found = find_zero_variance(trainer, further, first.bounds)
            rounds.append(further)
            chosen |= {place: (further, number) for place, number in zip(missing, found.kept, strict=False)}
            missing, generated = missing[len(found.kept) :], generated + count
    return chosen, {
        "dynamic_sampling/rounds": len(rounds) - 1,
        "dynamic_sampling/generated_groups": generated,
        "dynamic_sampling/discarded_groups": generated - len(chosen),
    }


def divide_by_one_deviation(
    trainer: "DAPOTrainer",
    rounds: list[Rollout],
    chosen: Mapping[int, tuple[Rollout, int]],
    replayed: Mapping[int, "Group"],
) -> dict[int, "Group"]:
    """Divide the advantages of all rounds by the deviation over the groups that are trained on.

    Used for `reinforce_plus_plus`, and for `scale_rewards batch`, which counts and divides replayed groups too. A
    filtered group that nothing replaces is not trained on, and does not count.

    Returns:
        the replayed groups.
    """
    estimator, selections = trainer.args.advantage_estimator, [_selection(rollout) for rollout in rounds]
    first, size = selections[0], selections[0].placement.num_generations
    own = torch.ones(first.placement.num_groups, dtype=torch.bool, device=first.rewards.device)
    own[[*first.filtered, *chosen, *replayed]] = False
    rewards = [first.rewards.view(-1, size)[own].flatten()]
    rewards += [_selection(source).rewards.view(-1, size)[number] for source, number in chosen.values()]
    if estimator == "grpo":
        rewards += [group.rewards.to(first.rewards) for group in replayed.values()]
    trained = torch.cat(rewards)

    def divided(rewards: torch.Tensor) -> torch.Tensor:
        return estimate_advantages(rewards, size, estimator, trained=trained.to(rewards.device))

    for selection in selections:
        selection.advantages = divided(selection.rewards)
    rounds[0].batch = {**rounds[0].batch, "advantages": first.local_advantages}
    every = [value for selection in selections for value in selection.advantages.tolist()]
    replace_newest(trainer._logs["advantages"], every)
    if estimator != "grpo":
        return dict(replayed)
    return {place: replace(group, advantages=divided(group.rewards)) for place, group in replayed.items()}


def _selection(rollout: Rollout) -> GroupSelection:
    assert rollout.selection is not None
    return rollout.selection


def _groups(trainer: "DAPOTrainer", rollout: Rollout, wanted: list[int]) -> list["Group"]:
    selection = _selection(rollout)
    return groups_from_batch(
        rollout.batch,
        wanted,
        selection.placement,
        advantages=selection.advantages,
        rewards=selection.task_rewards,
        pad_token_id=trainer._tokenizer.pad_token_id,
        step=trainer.state.global_step,
        signals=rollout.signals,
    )


def greedy_baseline(trainer: "DAPOTrainer", rollout: Rollout, placement: Placement) -> torch.Tensor:
    """Return the reward of one greedy completion per prompt for ReMax, (num_groups,), the same on every process.

    The process with a prompt's first completion generates it. Rewards that compare a group count as 0. Every process
    generates equally often and equally much; nothing of it is logged.
    """
    firsts = [
        [group for group in range(placement.num_groups) if placement.holder(group) == process]
        for process in range(placement.num_processes)
    ]
    most, first_row = max(map(len, firsts)), placement.process_index * placement.rows
    mine = [group * placement.num_generations - first_row for group in firsts[placement.process_index]]
    rows = mine + [0] * (most - len(mine))  # others generate too, so that all make the same collective calls
    assert rollout.messages is not None
    rewards = trainer.greedy_rewards([rollout.rows[row] for row in rows], [rollout.messages[row] for row in rows])
    sums = weighted_sums(rewards, trainer.reward_weights).nan_to_num().view(placement.num_processes, most)
    return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])


# Zero-variance groups and online filtering


def zero_variance_groups(
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    num_generations: int,
    *,
    estimator: str = "grpo",
    epsilon: float = 1e-6,
) -> list[int]:
    """Return the numbers of the groups without a gradient.

    For `grpo`, whose advantages are divided by the deviation of the rewards, that deviation is at most `epsilon`, as it
    is for fewer than two rewards; for other estimators the largest |advantage| is.

    Args:
        advantages: (num_groups * G,).
        rewards: weighted sums, (num_groups * G,), NaN for a completion without any.
        epsilon: at least 0.
    """
    return _numbers(~(group_spread(advantages, rewards, num_generations, estimator=estimator) > epsilon))


def group_spread(
    advantages: torch.Tensor, rewards: torch.Tensor, num_generations: int, *, estimator: str = "grpo"
) -> torch.Tensor:
    """Return the deviation of each group's rewards for `grpo`, else its largest |advantage|, (num_groups,)."""
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
        rewards: one number per completion, (num_groups * G,), NaN for one without.
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


def filter_index(key: str, names: Sequence[str]) -> int | None:
    """Return the position of the reward function that online filtering looks at, None for the weighted sums.

    Args:
        key: `overall`, the name of a reward function with or without its last part (`accuracy` for `accuracy_reward`),
            or a part of it between underscores that no other has.

    Raises:
        ConfigError: no reward function, or more than one, has that name.
    """
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


class ZeroVarianceStreak:
    """Counts the steps for which no generated group had a gradient, and why, and warns of the fifth in a row."""

    def __init__(self, args: "DAPOConfig") -> None:
        self._args = args
        served = (args.steps_per_generation or 1) * args.num_iterations // args.gradient_accumulation_steps
        self._steps_per_rollout = max(served, 1)
        self._start_over()

    def _start_over(self) -> None:
        self._first: int | None = None
        self._warned = False
        self._groups = self._equal = self._filtered = 0

    def add(self, groups: int, equal: int, filtered: int) -> None:
        """Count the groups of one generation: all, those with equal rewards, and others that online filtering drops."""
        self._groups += groups
        self._equal += equal
        self._filtered += filtered

    def end_rollout(self, step: int, kept: int) -> str | None:
        """Return one sentence when the streak reaches 5 steps, once for each streak.

        Args:
            step: global step of the rollout, counted from 0.
            kept: groups generated for it that have a gradient, further prompts included.
        """
        if kept:
            self._start_over()
            return None
        self._first = step if self._first is None else self._first
        steps = step - self._first + self._steps_per_rollout
        if steps < LONGEST_STREAK or self._warned:
            return None
        self._warned = True
        effect = "only replayed groups are trained on" if self._args.replay_buffer_size else "nothing is trained"
        return (
            f"No group has had a gradient for {steps} steps, so {effect}: of {self._groups} groups {self._equal} have "
            f"equal rewards, and online_filtering drops {self._filtered}. Use questions or rewards for which the "
            f"completions of a prompt differ{', or wider bounds' * self._args.online_filtering}."
        )

    def save(self, folder: Path) -> None:
        """Write a streak into a checkpoint."""
        process = PartialState()
        if self._first is not None:
            state = {name: value for name, value in vars(self).items() if name not in _FIXED}
            save_share(state, folder, process.process_index, process.num_processes, "streak")

    def load(self, folder: Path) -> None:
        """Continue the streak of a checkpoint, which any number of processes may have written."""
        if shares := load_shares(folder, "streak"):
            vars(self).update({name: shares[0][name] for name in vars(self) if name not in _FIXED})


LONGEST_STREAK = 5  # steps
_FIXED = ("_args", "_steps_per_rollout")  # by the options


# Groups: the completions of one prompt, taken out of a rollout batch, and put into one


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class Group:
    """The G completions of one prompt, with all that training on them again takes.

    Every process knows of every group; one of them, the holder, has its rows.

    Attributes:
        advantages: (G,) float32, on the CPU.
        rewards: (G,) float32, weighted sums without what the KL adds; NaN for a completion without any. On the CPU.
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

    @cached_property
    def priority(self) -> float:
        """What decides how long it stays in a replay buffer, and how often it is drawn; see `priority`."""
        return priority(self.advantages.unsqueeze(0), self.rewards.unsqueeze(0)).item()

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
) -> list[Group]:
    """Return the groups with the numbers `wanted`, copied to the CPU.

    The process with a group's first completion becomes its holder. If any wanted group is spread over processes, all
    of them gather once, to bring its other rows there.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them.
        wanted: numbers of groups, the same on every process.
        advantages: of all processes, (num_groups * G,); those of `batch` are not read.
        rewards: weighted sums, likewise.

    Raises:
        DataError: the batch cannot be cut into rows.
    """
    rows = Rows.of_batch({**batch, **columns_of_signals(signals)})
    rows.columns.pop("advantages", None)
    lengths = [batch[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask")]
    pieces = {}
    for group in wanted:
        if here := [row for row, _ in placement.here(group)]:
            widths = [max(1, *(lengths_of[row] for row in here)) for lengths_of in lengths]
            pieces[group] = rows.take(here).trim(*widths).stored()
    holders = {group: placement.holder(group) for group in wanted}
    whole = placement.bring_to_holders(pieces, holders, gather_object)

    def joined(group: int) -> Rows | None:
        if group not in whole:
            return None
        parts = whole[group]
        return parts[0] if len(parts) == 1 else join_rows(parts, pad_token_id=pad_token_id).stored()

    size = placement.num_generations
    advantages, rewards = (v.detach().to("cpu", torch.float32).view(-1, size) for v in (advantages, rewards))
    return [
        Group(advantages[group].clone(), rewards[group].clone(), step, holders[group], joined(group))
        for group in wanted
    ]


def _with_columns(rows: Rows, columns: dict[str, Any]) -> Rows:
    return replace(rows, columns={**rows.columns, **columns})


def insert_groups(
    batch: Mapping[str, Any],
    replacements: Mapping[int, Group],
    placement: Placement,
    *,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    signals: RolloutSignals | None = None,
) -> tuple[dict[str, Any], RolloutSignals | None]:
    """Return the batch and its signals with other groups in the place of some; the arguments are not changed.

    The local batch is padded to the longest prompt and completion in it, and keeps its structure: what it does not
    have (reference log-probabilities, say) is not brought in, except for image inputs. `num_items_in_batch` is not
    corrected; see `correct_num_items`. If any group has to go to another process, all of them gather once.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them, with advantages (N,).
        replacements: number of a group of the batch -> the group that takes its place; the same on every process. It
            may come from a buffer or from another batch.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a group lacks what the batch has.
    """
    rows = Rows.of_batch({**batch, **columns_of_signals(signals)})
    parts, source = [rows], list(range(len(rows)))
    for target, group in _brought(replacements, placement).items():
        here = placement.here(target)
        first = sum(map(len, parts))
        parts.append(group.take([index for _, index in here]))
        for position, (row, _) in enumerate(here):
            source[row] = first + position
    if len(parts) == 1:
        return dict(batch), signals
    joined = join_rows(parts, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of).take(source)
    return joined.into_batch(batch), signals_of_columns(joined.columns)


def _brought(replacements: Mapping[int, Group], placement: Placement) -> dict[int, Rows]:
    """The rows of the groups of which this process needs some, with their advantages."""
    travelling = [target for target, group in replacements.items() if list(placement.holders(target)) != [group.holder]]
    arrived = {target: group.rows for target, group in replacements.items()}
    if travelling:
        sent = [(target, arrived[target]) for target in travelling if arrived[target] is not None]
        arrived |= dict(gather_object(sent))
    needed = {target: arrived[target] for target in replacements if placement.here(target)}
    return {
        target: _with_columns(rows, {"advantages": replacements[target].advantages})
        for target, rows in needed.items()
        if rows is not None
    }


def correct_num_items(batch: Mapping[str, Any], gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the batch with the `num_items_in_batch` that it now has, as TRL counts: valid tokens of all processes."""
    return {**batch, "num_items_in_batch": gather(valid_tokens(batch).sum()).sum()}


# Further prompts for dynamic sampling, the same on every process


class FurtherPrompts:
    """Draws rows of the train data again and again, in an order of its own, for further rounds of rollout batches.

    Data with a length are shuffled for each pass over them, independently of the order of the epochs; a stream is read
    in its own order, and once more from its start where an interrupted run goes on.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        self.drawn = 0  # rows passed so far, used or not
        self._rows: Iterator[Any] | None = None
        self._used: set[str] = set()

    @classmethod
    def of(cls, trainer: "DAPOTrainer") -> "FurtherPrompts":
        """Return those of a trainer's data, a stream in another order than that in which TRL reads it."""
        dataset, seed = trainer.train_dataset, trainer.args.seed
        if isinstance(dataset, IterableDataset) and trainer.shuffle_dataset:
            dataset = dataset.shuffle(seed=seed + 1)
        return cls(ReadOnce(dataset) if reads_alike(dataset) else dataset, seed)

    def begin(self, rows: Sequence[Mapping[str, Any]], placement: Placement) -> None:
        """Note the prompts of a batch, which no further round draws again."""
        firsts = [row for group in range(placement.num_groups) for row, place in placement.here(group) if place == 0]
        self._used = set(gather_object([prompt_key(rows[row]) for row in firsts]))

    def draw(self, missing: int, placement: Placement) -> tuple[list[dict[str, Any]], int]:
        """Return this process's rows of a round, and how many prompts it has; none where the data have no more."""
        size, processes = placement.num_generations, placement.num_processes
        prompts = self._unused(prompts_of_round(missing, size, processes))
        step = prompts_of_round(1, size, processes)
        count = len(prompts) // step * step
        return rows_of_process(prompts[:count], size, placement.process_index, processes), count

    def _unused(self, count: int) -> list[Any]:
        """The next rows with other prompts, at most those of two passes over the data."""
        found: list[Any] = []
        passes = 0
        self._rows = self._endless() if self._rows is None else self._rows
        while len(found) < count and passes < 2:
            row = next(self._rows)
            if row is None:
                passes += 1
                continue
            self.drawn += 1
            if (key := prompt_key(row)) not in self._used:
                self._used.add(key)
                found.append(row)
        return found

    def _endless(self) -> Iterator[Any]:
        """Rows from number `drawn` on, and None at the end of each pass."""
        if hasattr(self.dataset, "__len__"):
            turn, passed = divmod(self.drawn, len(self.dataset))
            while True:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
                for index in torch.randperm(len(self.dataset), generator=generator).tolist()[passed:]:
                    row = self.dataset[index]
                    pop_replaced([row])
                    yield row
                turn, passed = turn + 1, 0
                yield None
        rest = self.drawn  # rows to pass over; a short stream is passed over several times
        while True:
            fresh = False
            for row in self.dataset:
                if rest:
                    rest -= 1
                else:
                    fresh = True
                    yield row
            if fresh:
                yield None

    def save(self, folder: Path) -> None:
        """Write into a checkpoint where the order is."""
        processes = PartialState()
        save_share({"drawn": self.drawn}, folder, processes.process_index, processes.num_processes, "prompts")

    def load(self, folder: Path) -> None:
        """Continue with the order of a checkpoint, with the same data and seed."""
        if not (shares := load_shares(folder, "prompts")):
            logger.warning(f"{folder} was written without dynamic_sampling: its prompts start from the beginning.")
            return
        self.drawn, self._rows = int(shares[0]["drawn"]), None


def prompts_of_round(missing: int, num_generations: int, num_processes: int) -> int:
    """Return the smallest number of prompts, at least `missing`, whose completions the processes share equally."""
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


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows with the same prompt and the same images."""

    def content(value: Any) -> str:
        return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else repr(value)

    return json.dumps([row["prompt"], images_of(row)], sort_keys=True, default=content)


# A buffer of groups that had a gradient, to take the place of groups that have none


class ReplayBuffer:
    """Keeps the groups of highest priority and draws from them.

    The priority of a group is the sum of |advantage| times the standard deviation of its rewards. A group without a
    gradient or whose mean reward is too low does not enter. When the buffer is full the group of lowest priority
    leaves, of equal ones the oldest, so that a new group takes the place of an old one of the same priority.

    With several processes each has a buffer that knows all groups, adds and draws the same ones (as long as it is
    called with the same arguments everywhere) and has the rows of those groups that the process is the holder of.

    Args:
        size: groups to keep at most, at least 1.
        min_reward: mean reward that a group needs to enter. None: any.
        variance_epsilon: when a group has no gradient, see `zero_variance_groups`; at least 0.
        max_age: steps after which a group leaves, at least 1. None: never.
        seed: of what is drawn.
        estimator: of the groups' advantages.
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
        self.size, self.min_reward, self.variance_epsilon = size, min_reward, variance_epsilon
        self.max_age, self.estimator = max_age, estimator
        self.step = 0
        self._groups: list[Group] = []  # in the order of being added
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def megabytes(self) -> float:
        """Millions of bytes that the rows on this process take, each prompt's images counted once."""
        return sum(group.nbytes for group in self._groups) / 1e6

    @property
    def mean_age(self) -> float:
        """Steps since the groups were generated, on average; 0 for an empty buffer."""
        ages = [self.step - group.step for group in self._groups]
        return sum(ages) / len(ages) if ages else 0.0

    def advance(self, step: int) -> None:
        """Say that `step` is the global step; groups older than `max_age` leave."""
        self.step = step
        if self.max_age is not None:
            self._groups = [group for group in self._groups if step - group.step <= self.max_age]

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each of the groups would enter by itself; cheaper than making them.

        Args:
            advantages: (num_groups, G).
            rewards: weighted sums, (num_groups, G).
        """
        values = priority(advantages, rewards)
        found = group_spread(advantages.flatten(), rewards.flatten(), rewards.size(-1), estimator=self.estimator)
        enters = (found > self.variance_epsilon) & values.isfinite()
        if self.min_reward is not None:
            enters &= rewards.double().nanmean(dim=-1) >= self.min_reward
        if len(self) >= self.size:
            enters &= values >= min(group.priority for group in self._groups)
        return enters.tolist()

    def add(self, group: Group) -> bool:
        """Add a group, unless it is not admitted; return whether it was."""
        if not self.admits(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))[0]:
            return False
        self._groups.append(group)
        self.step = max(self.step, group.step)
        if len(self) > self.size:
            self._groups.remove(min(self._groups, key=lambda each: each.priority))  # of equal ones the first
        return True

    def sample(self, count: int) -> list[Group]:
        """Draw `count` different groups, each with probability proportional to its priority among those left.

        Groups of priority 0 are drawn, with equal probabilities, when no others are left. All stay in the buffer.

        Args:
            count: at least 0; where it is more than there are, all are returned.
        """
        if not count or not self._groups:
            return []
        weights = torch.tensor([group.priority for group in self._groups], dtype=torch.float64)
        least = torch.finfo(weights.dtype).tiny  # of a group of priority 0, which comes behind all others
        order = torch.multinomial(weights.clamp(min=least), min(count, len(self)), generator=self._generator)
        return [self._groups[index] for index in order.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return what this process has, as tensors, numbers, lists and dictionaries (for `torch.save`)."""
        return {
            "step": self.step,
            "estimator": self.estimator,
            "generator": self._generator.get_state(),
            "groups": [group.state_dict() for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the options of this buffer hold for the groups too.

        For another number of processes see `merge_states` and `split_state`.
        """
        self._generator.set_state(state["generator"])
        self._groups = []
        for saved in state["groups"]:
            self.add(Group.from_state(saved))
        self.advance(state["step"])


def priority(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the sum of |advantages| (num_groups, G) times the deviation of the rewards, (num_groups,) float64."""
    return advantages.double().abs().sum(dim=-1) * group_std(rewards.flatten(), rewards.size(-1))


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the rows of all groups, from the states that the processes of a run saved together.

    Args:
        states: what `ReplayBuffer.state_dict` returned on each process of one checkpoint, in any order.
    """
    first = states[0]
    groups = [
        next(state["groups"][index] for state in states if state["groups"][index]["rows"] is not None)
        for index in range(len(first["groups"]))
    ]
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


# The replay buffer of a trainer: what is drawn, what enters and when, what is logged and saved of it


class Replay:
    """Groups of earlier rollout batches, which take the place of zero-variance ones."""

    def __init__(self, trainer: "DAPOTrainer") -> None:
        args, self._trainer = trainer.args, trainer
        self.buffer = ReplayBuffer(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )

    def draw(self, count: int) -> list[Group]:
        """Return up to `count` groups for the current batch; those that have become too old leave before."""
        self.buffer.advance(self._trainer.state.global_step)
        return self.buffer.sample(count)

    def keep(self, trainer: "DAPOTrainer", rollout: Rollout, fresh: dict[int, Group]) -> None:
        """Put groups with a gradient into the buffer.

        Args:
            fresh: groups of further prompts, by their place in the batch.
        """
        selection = _selection(rollout)
        size = selection.placement.num_generations
        values = (each.cpu().view(-1, size) for each in (selection.advantages, selection.task_rewards))
        admitted = self.buffer.admits(*values)
        wanted = [group for group in selection.kept if admitted[group]]
        for group in [*map(_with_measured_logps, _groups(trainer, rollout, wanted)), *fresh.values()]:
            self.buffer.add(group)

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return what is logged of the buffer, the same on every process, which all call it.

        Args:
            replaced_fraction: groups of the batch that came from the buffer, of all.
        """
        accelerator = self._trainer.accelerator
        megabytes = accelerator.gather(torch.tensor([self.buffer.megabytes], device=accelerator.device))
        return {
            "replay/size": len(self.buffer),
            "replay/megabytes": megabytes.sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": self.buffer.mean_age,
        }

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, complete or not at all."""
        accelerator = self._trainer.accelerator
        state = {**self.buffer.state_dict(), "contents": self._contents()}
        save_share(state, folder, accelerator.process_index, accelerator.num_processes, "replay")

    def load(self, folder: Path) -> None:
        """Continue with the buffer of a checkpoint, which another number of processes may have written.

        It starts empty, with a warning, if its groups cannot be trained on with the options of this run.
        """
        accelerator, states = self._trainer.accelerator, load_shares(folder, "replay")
        reason: str | None = "the checkpoint was written without replay_buffer_size"
        if states:
            merged = merge_states(states)
            reason = self._why_unusable(merged)
            if reason is None:
                self.buffer.load_state_dict(split_state(merged, accelerator.process_index, accelerator.num_processes))
        if reason is not None and accelerator.is_main_process:
            logger.warning(f"The replay buffer of {folder} starts empty: {reason}.")

    def _contents(self) -> list[str]:
        """The options that decide what is stored of each group, as far as they are on, and what is measured of it."""
        args, measurement = self._trainer.args, self._trainer.measurement
        options = {
            "beta": args.beta != 0,
            "kl_coef": args.kl_coef > 0,
            "kl_penalty full": args.has_kl_loss and args.kl_penalty == "full",
            "use_vllm": args.use_vllm and args.vllm_importance_sampling_correction,
            "perception_loss_weight or der_loss_weight2": args.uses_perception_loss,
        }
        rules = [short_name(rule) for rule in active_rules(args)]
        return [*(name for name, is_on in options.items() if is_on), *measurement.needed, *measurement.views, *rules]

    def _why_unusable(self, state: Mapping[str, Any]) -> str | None:
        """Why the groups of a saved buffer cannot be trained on with the options of this run, None if they can."""
        args = self._trainer.args
        if state["estimator"] != args.advantage_estimator:
            return f"advantage_estimator is {args.advantage_estimator}, and was {state['estimator']}"
        sizes = {len(group["advantages"]) for group in state["groups"]}
        if sizes - {args.num_generations}:
            return f"num_generations is {args.num_generations}, and its groups have {max(sizes)} completions"
        if missing := [name for name in self._contents() if name not in state["contents"]]:
            return f"it was stored without {' and '.join(missing)}"
        return None


def _with_measured_logps(group: Group) -> Group:
    if group.rows is None or OLD_LOGPS in group.rows.columns:
        return group
    return replace(group, rows=_with_columns(group.rows, {OLD_LOGPS: group.rows.columns["signals.logps"]}))
