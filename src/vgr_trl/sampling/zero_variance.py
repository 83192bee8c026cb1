"""Select the groups of a rollout to train on: drop, resample and replay zero-variance groups.

Tensors about groups cover all processes, prompt by prompt, so that every process finds the same groups.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import count
from math import gcd
from typing import Any, cast

import torch
import xxhash
from accelerate.utils import gather_object
from datasets import IterableDataset
from PIL import Image
from torch import Tensor
from transformers.utils import logging

from vgr_trl.advantages import estimate_advantages, group_spread
from vgr_trl.batch import Placement, per_token
from vgr_trl.checkpoints import SavedState
from vgr_trl.credit import masked_mean
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import ReadOnce, is_repeatable, pop_replaced
from vgr_trl.data.images import ORIGINAL_IMAGES, images_of
from vgr_trl.errors import ConfigError
from vgr_trl.patches.trl import merge_round_metrics, replace_newest
from vgr_trl.rollout import GroupSelection, Rollout, weighted_sums
from vgr_trl.run import Run
from vgr_trl.sampling.replay import Group, Replay, cut_groups, insert_groups

logger = logging.get_logger(__name__)
Chosen = dict[int, tuple[Rollout, int]]  # group of the batch -> rollout and number of the group that replaces it


@dataclass
class GroupSelector:
    """Selects the groups of a rollout to train on, and replaces the others.

    Attributes:
        run: options and processes.
        replay, further_prompts: sources of replacement groups; None where they are off.
        generate: generates, scores and rewards further rows of the data.
        greedy_rewards: returns the rewards of a greedy completion of each row, (N of all, F), given their prompts.
        metrics: metrics of training that wait to be logged, of each rollout.
        table: columns of the table of completions.
        reward_names: names of the reward functions.
    """

    run: Run
    replay: Replay | None
    further_prompts: "FurtherPrompts | None"
    generate: Callable[[list[dict[str, Any]]], Rollout]
    greedy_rewards: Callable[[list[dict[str, Any]], list[Any]], Tensor]
    metrics: dict[str, list[float]]
    table: dict[str, Any]
    reward_names: Sequence[str]

    def select(self, rollout: Rollout, weights: Tensor) -> dict[str, float]:
        """Replace zero-variance groups of a rollout by further or replayed groups, if switched on; return metrics.

        Args:
            rollout: rollout of the batch.
            weights: (F,), weights of the reward functions in this step.
        """
        args, replay, metrics, chosen = self.run.args, self.replay, dict[str, float](), Chosen()
        selection, rounds = self.find_zero_variance(rollout, weights), [rollout]
        if self.further_prompts is not None:
            chosen, metrics = self.resample(self.further_prompts, rounds, weights)
        selection.trained = trained = len(selection.kept) + len(chosen)
        if not args.selects_groups:
            rollout.with_gradient = selection.rows_with_gradient()
            return {"sampling/nonzero_variance_fraction": trained / selection.placement.num_groups}
        missing = [group for group in selection.dropped if group not in chosen]
        replayed = {} if replay is None else dict(zip(missing, replay.draw(len(missing)), strict=False))
        estimator, changes = args.advantage_estimator, chosen or replayed or selection.filtered
        if estimator == "reinforce_plus_plus" or (estimator == "grpo" and args.scale_rewards == "batch" and changes):
            replayed = divide_by_one_deviation(rounds, chosen, replayed, estimator)
            advantages = [value for source in rounds for value in source.selection.advantages.tolist()]
            replace_newest(self.table["advantages"], advantages)
        metrics |= self._replace_groups(rollout, chosen, replayed)
        # The rewards of a filtered group differ: without this, an unreplaced filtered group would be trained on.
        of_rows = cast("Tensor", rollout.batch.advantages)
        rollout.batch = replace(rollout.batch, advantages=of_rows * rollout.with_gradient.to(of_rows.device))
        return metrics

    def _replace_groups(self, rollout: Rollout, chosen: Chosen, replayed: dict[int, Group]) -> dict[str, float]:
        """Insert groups from further rounds and from the buffer into a rollout; return metrics."""
        run, replay, selection = self.run, self.replay, rollout.selection
        pad_token_id, metrics = run.tokenizer.pad_token_id, dict[str, float]()
        fresh = {place: cut_groups(source, [number], pad_token_id, run.step)[0]
                 for place, (source, number) in chosen.items()}  # fmt: skip
        if replay is not None:
            replay.keep(rollout, list(fresh.values()))
        replacements = fresh | replayed
        if replayed and rollout.signals is not None and rollout.batch.old_logps is None:  # stored groups have them
            rollout.batch = replace(rollout.batch, old_logps=rollout.signals.logps)
        if replacements:
            insert_groups(rollout, replacements, run.accelerator.gather, pad_token_id, run.pad_to_multiple_of)
        num_groups = selection.placement.num_groups
        if replay is not None:
            metrics = replay.metrics(len(replayed) / num_groups)
        metrics["sampling/nonzero_variance_fraction"] = (selection.trained + len(replayed)) / num_groups
        rollout.with_gradient, rollout.replaced = selection.rows_with_gradient(replacements), sorted(replacements)
        return metrics

    def resample(
        self, prompts: "FurtherPrompts", rounds: list[Rollout], weights: Tensor
    ) -> tuple[Chosen, dict[str, float]]:
        """Generate for further prompts; return the groups that replace dropped groups, and metrics.

        DAPO (https://huggingface.co/papers/2503.14476) generates until every group of the batch has a gradient; here
        the number of rounds is limited.

        Args:
            prompts: further prompts.
            rounds: the rollout of the batch; further rollouts are appended.
            weights: (F,), weights of the reward functions.
        """
        first = rounds[0].selection
        processes = self.run.accelerator.num_processes
        missing, chosen, generated = list(first.dropped), Chosen(), 0
        if missing:
            prompts.begin(rounds[0].rows, first.placement)
        with merge_round_metrics(self.metrics, self.table, first.placement.rows, processes) as completions:
            while missing and len(rounds) <= self.run.args.dynamic_sampling_max_rounds:
                rows, count = prompts.draw(len(missing), first.placement)
                if not rows:
                    break
                completions.append(len(rows))
                further = self.generate(rows)
                kept = self.find_zero_variance(further, weights, first.bounds).kept
                rounds.append(further)
                chosen |= {place: (further, number) for place, number in zip(missing, kept, strict=False)}
                missing, generated = missing[len(kept) :], generated + count
        return chosen, {
            "dynamic_sampling/rounds": len(rounds) - 1,
            "dynamic_sampling/generated_groups": generated,
            "dynamic_sampling/discarded_groups": generated - len(chosen),
        }

    def find_zero_variance(
        self, rollout: Rollout, weights: Tensor, bounds: tuple[float, float] | None = None
    ) -> GroupSelection:
        """Estimate advantages and find the groups without a gradient; update advantages in batch and table.

        Args:
            rollout: gets the selection, and the advantages of its batch.
            weights: (F,), weights of the reward functions.
            bounds: quantiles of online filtering from the first round; None: this is the first round.
        """
        args, accelerator, size = self.run.args, self.run.accelerator, int(self.run.args.num_generations or 1)
        estimator, baseline = args.advantage_estimator, None
        batch, rows = rollout.batch, len(rollout.batch)
        placement = Placement(rows, size, accelerator.process_index, accelerator.num_processes)
        rewards = weighted_sums(rollout.rewards, weights)
        tasks = sum_task_rewards(rollout.rewards, weights, args.penalises_kl)
        advantages = accelerator.gather(batch.advantages)
        rollout.selection = selection = GroupSelection(placement, rewards, tasks, advantages)
        if args.uses_critic:
            of_tokens = batch.columns["token_advantages"].nan_to_num()  # (N, T)
            selection.advantages = accelerator.gather(masked_mean(of_tokens, batch.valid).squeeze(1))
        elif estimator != "grpo":
            if estimator == "remax":
                baseline = self.greedy_baseline(rollout, placement, weights)
            selection.advantages = estimate_advantages(rewards, size, estimator, baseline)
        if estimator != "grpo":
            rollout.batch = replace(batch, advantages=selection.local_advantages)
            replace_newest(self.table["advantages"], selection.advantages.tolist())
        zero_variance, filtered = list[int](), list[int]()
        if not args.uses_critic:
            advantages = selection.advantages
            if args.penalises_kl:  # the KL penalty differs within a group, but says nothing about the task
                advantages = estimate_advantages(tasks, size, estimator, baseline)
            spread = group_spread(advantages.view(-1, size), tasks.view(-1, size), estimator)
            zero_variance = _true_indices(~(spread > args.replay_var_epsilon))  # NaN too
        if args.online_filtering:
            index, is_quantile = filter_index(args.filter_key, self.reward_names), args.filter_mode == "quantile"
            compared = tasks if index is None else rollout.rewards[:, index]
            means = compared.double().view(-1, size).nanmean(dim=1)  # (num_groups,), NaN for a group without rewards
            selection.bounds = bounds or (args.filter_low, args.filter_high)
            if is_quantile and bounds is None:
                quantiles = (means.nanquantile(share).item() for share in (args.filter_low, args.filter_high))
                selection.bounds = next(quantiles), next(quantiles)
            filtered = filtered_groups(means, *selection.bounds, inclusive=is_quantile)
        selection.filtered = sorted(set(filtered).difference(zero_variance))
        selection.dropped = sorted({*zero_variance, *filtered})
        return selection

    def greedy_baseline(self, rollout: Rollout, placement: Placement, weights: Tensor) -> Tensor:
        """Reward one greedy completion per prompt for ReMax, (num_groups,), the same on every process.

        The process with a prompt's first completion generates it. Rewards that compare a group count as 0; a
        completion without other rewards has no baseline (NaN). Every process generates equally many completions;
        nothing is logged.

        Args:
            rollout: rollout with its rows and their conversations.
            placement: groups of the rollout on the processes.
            weights: (F,), weights of the reward functions.
        """
        holders, processes = [*map(placement.holder, range(placement.num_groups))], range(placement.num_processes)
        firsts = [[group for group, holder in enumerate(holders) if holder == process] for process in processes]
        most, first_row = max(map(len, firsts)), placement.process_index * placement.rows
        mine = [group * placement.num_generations - first_row for group in firsts[placement.process_index]]
        rows = mine + [0] * (most - len(mine))  # collective calls: every process generates as many completions
        rewards = self.greedy_rewards([rollout.rows[row] for row in rows], [rollout.messages[row] for row in rows])
        sums = weighted_sums(rewards, weights).view(placement.num_processes, most)
        return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])


def divide_by_one_deviation(
    rounds: list[Rollout], chosen: Chosen, replayed: Mapping[int, Group], estimator: str
) -> dict[int, Group]:
    """Divide the advantages of all rounds by one standard deviation over the groups to train on.

    `reinforce_plus_plus` and `scale_rewards batch` need it; the latter counts and divides replayed groups too. A
    filtered group that nothing replaces does not count.

    Args:
        rounds: the rollout of the batch, and further rollouts; their advantages are replaced.
        chosen: groups of the rounds that replace dropped groups.
        replayed: groups of the buffer that replace dropped groups.
        estimator: `reinforce_plus_plus` or `grpo`.

    Returns:
        The replayed groups, for `grpo` with new advantages.
    """
    selections = [rollout.selection for rollout in rounds]
    first, size = selections[0], selections[0].placement.num_generations
    stays = torch.ones(first.placement.num_groups, dtype=torch.bool, device=first.rewards.device)
    stays[[*first.filtered, *chosen, *replayed]] = False
    rewards = [first.rewards.view(-1, size)[stays].flatten()]
    rewards += [source.selection.rewards.view(-1, size)[number] for source, number in chosen.values()]
    divided = replayed if estimator == "grpo" else {}
    trained = torch.cat(rewards + [group.rewards.to(first.rewards) for group in divided.values()])
    for selection in selections:
        selection.advantages = estimate_advantages(selection.rewards, size, estimator, trained=trained)
    rounds[0].batch = replace(rounds[0].batch, advantages=first.local_advantages)
    again = {
        place: replace(group, advantages=estimate_advantages(group.rewards, size, estimator, trained=trained.cpu()))
        for place, group in divided.items()
    }
    return {**replayed, **again}


def sum_task_rewards(rewards: Tensor, weights: Tensor, has_penalty: bool) -> Tensor:
    """Sum the rewards of the task.

    Args:
        rewards: (N of all processes, F), one column per reward function.
        weights: (F,), weights of the reward functions.
        has_penalty: whether the last column is the KL penalty, which the sums leave out.

    Returns:
        (N of all processes,), NaN for a completion without a reward.
    """
    count = rewards.size(1) - has_penalty
    return weighted_sums(rewards[:, :count], weights[:count])


def filtered_groups(means: Tensor, low: float, high: float, *, inclusive: bool = False) -> list[int]:
    """Return the groups whose mean reward is outside two bounds, or NaN.

    PRIME filters in this way (https://huggingface.co/papers/2502.01456).

    Args:
        means: (num_groups,), mean reward of each group; NaN for a group without rewards.
        low: lower bound.
        high: upper bound.
        inclusive: whether a mean at a bound is inside.
    """
    inside = (means >= low) & (means <= high) if inclusive else (means > low) & (means < high)
    return _true_indices(~inside)


def _true_indices(chosen: Tensor) -> list[int]:
    return chosen.nonzero().flatten().tolist()


def filter_index(key: str, names: Sequence[str], option: str = "filter_key") -> int | None:
    """Find the reward function that an option names, by its index; None for the weighted sums.

    Args:
        key: `overall`, the name of a reward function with or without its suffix `_reward`, or one word of its name that
            no other name has.
        names: names of the reward functions.
        option: the option, for the message.

    Raises:
        ConfigError: no reward function, or more than one, has that name.
    """
    if key == "overall":
        return None
    matches = [index for index, name in enumerate(names) if name in (key, f"{key}_reward")]
    matches = matches or [index for index, name in enumerate(names) if key in name.split("_")]
    if len(matches) != 1:
        named = f"{option} is {key!r}, which names {len(matches)} reward functions"
        raise ConfigError(f"{named}: give overall or one of {', '.join(names)}.")
    return matches[0]


LONGEST_STREAK = 5  # steps


class ZeroVarianceStreak(SavedState):
    """Counts consecutive steps without a generated group with a gradient, and warns at the fifth.

    Attributes:
        steps_per_rollout: optimizer steps per rollout, at least 1.
    """

    kind = "streak"

    def __init__(self, args: DAPOConfig) -> None:
        self._args, self._steps = args, 0
        self.steps_per_rollout = max(int(args.steps_per_rollout), 1)

    def warn(self, run: Run, rollout: Rollout) -> None:
        """Count a rollout, whose credit may train zero-variance groups; warn at the end of a streak."""
        advantages, trained = cast("Tensor", rollout.batch.advantages), rollout.selection.trained
        if run.args.shapes_tokens:
            added = per_token(advantages).abs().amax(1) > run.args.replay_var_epsilon  # (N,)
            added &= ~rollout.with_gradient.to(added.device)
            trained += int(run.accelerator.gather(added).sum())
        if run.measurement.term_needs & {"teacher", "teacher_top"}:  # a teacher trains all groups
            trained += len(rollout.selection.dropped)
        sentence = self.end_rollout(trained)
        if sentence is not None and run.accelerator.is_main_process:
            logger.warning(sentence)

    def end_rollout(self, kept: int) -> str | None:
        """Count a rollout; return a warning when the streak reaches 5 steps, once per streak.

        Args:
            kept: generated groups with a gradient, further prompts included, and completions that credit adds to.
        """
        before, self._steps = self._steps, 0 if kept else self._steps + self.steps_per_rollout
        if not before < LONGEST_STREAK <= self._steps:
            return None
        effect = "only replayed groups are trained on" if self._args.replay_buffer_size else "nothing is trained"
        cause = "rewards are equal within each group" + ", or online_filtering drops it" * self._args.online_filtering
        cure = "questions or rewards for which the completions of a prompt differ"
        cure += ", or wider bounds" * self._args.online_filtering
        return f"No group has had a gradient for {self._steps} steps, so {effect}: {cause}. Use {cure}."

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the streak, the same on all processes."""
        return {"steps": self._steps}

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Continue the streak of a checkpoint."""
        self._steps = states[0]["steps"]


class FurtherPrompts(SavedState):
    """Draws rows of the train data without end, in the same order on every process.

    Data with a length are shuffled for each pass over them, independently of the order of the epochs. A stream is read
    in its order, shuffled with another seed than TRL's if `shuffle` is on, and again from its start after a resume.
    """

    kind = "prompts"

    def __init__(self, dataset: Any, seed: int = 0, shuffle: bool | None = False) -> None:
        if isinstance(dataset, IterableDataset) and shuffle:
            dataset = dataset.shuffle(seed=seed + 1)
        self.dataset: Any = ReadOnce(dataset) if is_repeatable(dataset) else dataset
        self.seed = seed
        self.drawn = 0  # rows read so far, used or not
        self._rows = self._endless()
        self._used: set[str] = set()

    def begin(self, rows: Sequence[Mapping[str, Any]], placement: Placement) -> None:
        """Exclude this batch's prompts from resampling."""
        firsts = [row for group in range(placement.num_groups) for row, place in placement.here(group) if place == 0]
        self._used = set(gather_object([prompt_key(rows[row]) for row in firsts]))

    def draw(self, missing: int, placement: Placement) -> tuple[list[dict[str, Any]], int]:
        """Draw further prompts; return this process's rows, G adjacent rows per prompt, and the number of prompts.

        Args:
            missing: minimum number of prompts, rounded up until processes have equally many rows; fewer if data end.
            placement: G and the processes.
        """
        size, processes = placement.num_generations, placement.num_processes
        step = processes // gcd(processes, size)
        prompts = self._unused(-(-missing // step) * step)
        prompts = prompts[: len(prompts) // step * step]
        repeated = [dict(prompt) for prompt in prompts for _ in range(size)]
        here = len(repeated) // processes
        return repeated[placement.process_index * here :][:here], len(prompts)

    def _unused(self, count: int) -> list[Any]:
        """Return the next rows with unused prompts, from at most two passes over the data."""
        rows: list[Any] = []
        passes = 0
        while len(rows) < count and passes < 2:
            row = next(self._rows)
            if row is None:
                passes += 1
                continue
            self.drawn += 1
            if (key := prompt_key(row)) not in self._used:
                self._used.add(key)
                rows.append(row)
        return rows

    def _endless(self) -> Iterator[Any]:
        """Yield rows from number `drawn` on, and None at the end of each pass."""
        rest, has_length = self.drawn, isinstance(self.dataset, Sized)
        for turn in count():
            order = self.dataset
            if has_length:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
                order = torch.randperm(len(self.dataset), generator=generator).tolist()
            for entry in order:
                if rest:
                    rest -= 1
                    continue
                row = self.dataset[entry] if has_length else entry
                pop_replaced([row])
                yield row
            if not rest:
                yield None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows read."""
        return {"drawn": self.drawn}

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Continue in the order of a checkpoint, with the same data and seed."""
        self.drawn, self._rows = int(states[0]["drawn"]), self._endless()


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return a key that is equal for rows with the same prompt and the same images, before any degrading."""

    def content(value: Any) -> str:
        return xxhash.xxh3_128_hexdigest(value.tobytes()) if isinstance(value, Image.Image) else repr(value)

    images = row.get(ORIGINAL_IMAGES) or images_of(row)
    return json.dumps([row.get("prompt"), images], sort_keys=True, default=content)
