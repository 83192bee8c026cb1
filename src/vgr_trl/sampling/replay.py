"""Replay buffer: groups of earlier rollouts replace zero-variance groups."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.utils import logging

from vgr_trl.advantages import group_spread, priority
from vgr_trl.batch import Batch, Placement, join_batches
from vgr_trl.checkpoints import SavedState
from vgr_trl.credit import active_rules
from vgr_trl.metrics.step_metrics import Gather
from vgr_trl.pixels import RowImages
from vgr_trl.registries import short_name
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.named import columns_to_signals, signals_to_columns

logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class Group:
    """The G completions of one prompt, with everything needed to train on them again.

    Every process knows every group; one process, the holder, has its rows.

    Attributes:
        advantages: (G,) float32, on the CPU.
        rewards: (G,) float32, on the CPU: weighted sums without the KL penalty; NaN for a completion without a reward.
        step: global step of its generation.
        holder: process that has the rows.
        rows: rows on the CPU, trimmed to the group's longest prompt and completion; None on other processes.
    """

    advantages: Tensor
    rewards: Tensor
    step: int = 0
    holder: int = 0
    rows: Batch | None = None


def cut_groups(rollout: Rollout, wanted: Sequence[int], pad_token_id: int, step: int) -> list[Group]:
    """Copy groups of a rollout to the CPU.

    The process with a group's first completion becomes its holder. If any wanted group is spread over processes, all
    processes gather once, to bring its rows together. Measured log-probabilities replace the old log-probabilities that
    TRL omits from an on-policy batch.

    Args:
        rollout: rollout with its batch, signals and selection.
        wanted: numbers of the groups, the same on every process.
        pad_token_id: pads rows of different lengths.
        step: global step of the rollout.

    Raises:
        DataError: the batch cannot be cut into rows.
    """
    selection, placement = rollout.selection, rollout.selection.placement
    measured = {} if rollout.signals is None else {"old_logps": rollout.signals.logps}
    columns = measured | rollout.batch.all_columns | signals_to_columns(rollout.signals)
    batch = Batch.of_columns(columns | {"advantages": None, "num_items": None}, rollout.batch.images)
    lengths = [mask.sum(1).tolist() for mask in (batch.prompt_mask, batch.completion_mask)]
    holders = {group: placement.holder(group) for group in wanted}
    pieces: dict[int, list[Batch]] = defaultdict(list)  # group that this process holds -> its pieces, the local first
    kept, sent = list[tuple[int, Batch]](), list[tuple[int, Batch]]()
    for group in wanted:
        if here := [row for row, _ in placement.here(group)]:
            widths = [max(1, *(of_rows[row] for row in here)) for of_rows in lengths]
            pieces_of = kept if holders[group] == placement.process_index else sent
            pieces_of.append((group, batch.take(here).trim(*widths).stored()))
    is_spread = any(len(placement.holders(group)) > 1 for group in wanted)
    for group, piece in kept + (gather_object(sent) if is_spread else []):
        if holders[group] == placement.process_index:
            pieces[group].append(piece)
    whole = {group: join_batches(parts, pad_token_id=pad_token_id).stored() for group, parts in pieces.items()}
    advantages, rewards = (
        flat.detach().to("cpu", torch.float32).view(-1, placement.num_generations)
        for flat in (selection.advantages, selection.task_rewards)
    )
    return [
        Group(advantages[group].clone(), rewards[group].clone(), step, holder, whole.get(group))
        for group, holder in holders.items()
    ]


def insert_groups(
    rollout: Rollout,
    replacements: Mapping[int, Group],
    gather: Gather,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> None:
    """Replace groups in the batch and the signals of a rollout, and count its tokens again.

    The local batch is padded to its longest prompt and completion, and keeps its columns: other columns of a group
    (reference log-probabilities, say) are dropped, except for image inputs. If any group has to go to another process,
    all processes gather once.

    Args:
        rollout: gets the new batch and signals.
        replacements: number of a group of the batch -> the group that replaces it, from a buffer or from another batch;
            the same on every process.
        gather: concatenates a tensor over all processes.
        pad_token_id: pads rows of different lengths.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a group lacks a column of the batch.
    """
    placement = rollout.selection.placement
    parts = [rollout.batch.with_columns(**signals_to_columns(rollout.signals))]
    source = list(range(len(parts[0])))
    for target, rows in _bring_rows(replacements, placement).items():
        first = sum(map(len, parts))
        parts.append(rows)
        for row, index in placement.here(target):
            source[row] = first + index
    joined = join_batches(parts, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of).take(source)
    rollout.signals = columns_to_signals(joined.columns)
    columns = {name: value for name, value in joined.columns.items() if not name.startswith("signals.")}
    rollout.batch = replace(joined, columns=columns, num_items=gather(joined.valid.sum()).sum())


def _bring_rows(replacements: Mapping[int, Group], placement: Placement) -> dict[int, Batch]:
    """Fetch the rows of replacement groups that this process trains on, with their advantages."""
    travelling = [target for target, group in replacements.items() if list(placement.holders(target)) != [group.holder]]
    arrived = {target: group.rows for target, group in replacements.items()}
    if travelling:
        sent = [(target, arrived[target]) for target in travelling if arrived[target] is not None]
        arrived |= dict(gather_object(sent))
    return {
        target: replace(rows, advantages=replacements[target].advantages)
        for target, rows in arrived.items()
        if rows is not None and placement.here(target)
    }


@dataclass(eq=False)
class ReplayBuffer:
    """Keeps the groups with the highest priority and samples from them.

    The priority of a group is the sum of |advantage| times the standard deviation of its rewards. A group without a
    gradient, or with a too low mean reward, does not enter. A full buffer evicts the group with the lowest priority, of
    equal priorities the oldest group.

    With several processes, the buffer of each process knows all groups, adds and samples the same groups (if called
    with the same arguments everywhere), and has the rows of the groups that the process holds.

    Example:
        >>> buffer = ReplayBuffer(2)
        >>> buffer.add(Group(advantages=torch.tensor([1.0, -1.0]), rewards=torch.tensor([1.0, 0.0])))
        True
        >>> buffer.add(Group(advantages=torch.zeros(2), rewards=torch.ones(2)))  # without a gradient
        False
        >>> len(buffer.sample(1))
        1

    Attributes:
        size: largest number of groups, at least 1.
        min_reward: smallest mean reward of a group; None: no limit.
        variance_epsilon: a group has a gradient if its `group_spread` is above it; at least 0.
        max_age: steps after which a group leaves, at least 1; None: never.
        seed: seed of the samples.
        estimator: estimator of the groups' advantages.
    """

    size: int
    _: KW_ONLY
    min_reward: float | None = None
    variance_epsilon: float = 1e-6
    max_age: int | None = None
    seed: int = 0
    estimator: str = "grpo"

    def __post_init__(self) -> None:
        self.step, self.groups = 0, list[Group]()  # oldest first
        self._generator = torch.Generator().manual_seed(self.seed)

    def __len__(self) -> int:
        return len(self.groups)

    def _priorities(self) -> Tensor:
        advantages, rewards = zip(*((group.advantages, group.rewards) for group in self.groups), strict=True)
        return priority(torch.stack(advantages), torch.stack(rewards))

    def advance(self, step: int) -> None:
        """Set the step; evict groups older than `max_age`."""
        self.step = step
        if self.max_age is not None:
            self.groups = [group for group in self.groups if step - group.step <= self.max_age]

    def admits(self, advantages: Tensor, rewards: Tensor) -> list[bool]:
        """Return whether each group would enter the buffer by itself.

        Args:
            advantages: (num_groups, G).
            rewards: weighted sums, (num_groups, G).
        """
        values = priority(advantages, rewards)
        enters = (group_spread(advantages, rewards, self.estimator) > self.variance_epsilon) & values.isfinite()
        if self.min_reward is not None:
            enters &= rewards.double().nanmean(dim=1) >= self.min_reward
        if len(self) >= self.size:
            enters &= values >= self._priorities().min()
        return enters.tolist()

    def add(self, group: Group) -> bool:
        """Add a group if it is admitted; return whether it was."""
        if not self.admits(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))[0]:
            return False
        self.groups.append(group)
        self.step = max(self.step, group.step)
        if len(self) > self.size:
            del self.groups[int(self._priorities().argmin())]  # the oldest of equal priorities
        return True

    def sample(self, count: int) -> list[Group]:
        """Sample different groups, with probabilities proportional to their priorities.

        Groups of priority 0 are sampled last, with equal probabilities. All groups stay in the buffer.

        Args:
            count: number of groups, at least 0; at most all groups are returned.
        """
        if not count or not self.groups:
            return []
        weights = self._priorities().clamp(min=torch.finfo(torch.float64).tiny)
        order = torch.multinomial(weights, min(count, len(self)), generator=self._generator)
        return [self.groups[index] for index in order.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return this process's share of the buffer as tensors, numbers, lists and dictionaries."""
        return {
            "step": self.step,
            "estimator": self.estimator,
            "generator": self._generator.get_state(),
            "groups": [{**vars(group), "rows": group.rows and _pack(group.rows)} for group in self.groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups of a state that the options of this buffer admit.

        `deal_groups` converts states of another number of processes.
        """
        self._generator.set_state(state["generator"])
        self.groups = []
        for saved in state["groups"]:
            self.add(Group(**{**saved, "rows": saved["rows"] and _unpack(saved["rows"])}))
        self.advance(state["step"])


def _pack(rows: Batch) -> dict[str, Any]:
    return {**vars(rows), "images": vars(rows.images)}


def _unpack(saved: Mapping[str, Any]) -> Batch:
    return Batch(**{**saved, "images": RowImages(**saved["images"])})


def deal_groups(states: Sequence[Mapping[str, Any]], process_index: int, num_processes: int) -> dict[str, Any]:
    """Redistribute a saved buffer: a process knows all groups and holds the rows of every `num_processes`-th.

    Args:
        states: states of `ReplayBuffer.state_dict` from all processes of one checkpoint, in any order.
        process_index: the process that gets the state.
        num_processes: number of processes of this run.
    """
    groups = []
    for index, saved in enumerate(zip(*(state["groups"] for state in states), strict=True)):
        holder = index % num_processes
        rows = next(group["rows"] for group in saved if group["rows"] is not None)
        groups.append({**saved[0], "holder": holder, "rows": rows if holder == process_index else None})
    return {**states[0], "groups": groups}


class Replay(ReplayBuffer, SavedState):
    """The replay buffer of a run."""

    kind = "replay"

    def __init__(self, run: Run) -> None:
        args, self._run = run.args, run
        super().__init__(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )

    def draw(self, count: int) -> list[Group]:
        """Evict groups that are too old, and sample up to `count` groups for the current batch."""
        self.advance(self._run.step)
        return self.sample(count)

    def keep(self, rollout: Rollout, fresh: Sequence[Group]) -> None:
        """Add the groups of a rollout with a gradient.

        Args:
            rollout: rollout of the batch.
            fresh: groups of further prompts that replace groups of the rollout.
        """
        selection = rollout.selection
        size = selection.placement.num_generations
        admitted = self.admits(*(flat.cpu().view(-1, size) for flat in (selection.advantages, selection.task_rewards)))
        kept = [group for group in selection.kept if admitted[group]]
        for group in [*cut_groups(rollout, kept, self._run.tokenizer.pad_token_id, self.step), *fresh]:
            self.add(group)

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return the buffer's metrics, the same on every process; all processes call it.

        Args:
            replaced_fraction: share of the batch's groups that came from the buffer.
        """
        accelerator = self._run.accelerator
        megabytes = sum(group.rows.nbytes for group in self.groups if group.rows is not None) / 1e6  # on this process
        return {
            "replay/size": len(self),
            "replay/megabytes": accelerator.gather(torch.tensor([megabytes], device=accelerator.device)).sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": sum(self.step - group.step for group in self.groups) / max(len(self), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's state and the contents of its groups."""
        return {**super().state_dict(), "contents": self._contents()}

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Restore the buffer of a checkpoint, written by any number of processes.

        The buffer starts empty, with a warning, if this run's options cannot train on its groups.
        """
        accelerator, reason = self._run.accelerator, self._why_unusable(states[0])
        if reason is None:
            self.load_state_dict(deal_groups(states, accelerator.process_index, accelerator.num_processes))
        elif accelerator.is_main_process:
            logger.warning(f"The replay buffer of the checkpoint cannot be used and starts empty: {reason}.")

    def _contents(self) -> list[str]:
        """Return the active options that add columns to stored groups, and the names of their measurements."""
        args, measurement = self._run.args, self._run.measurement
        options = {
            "beta": args.beta != 0,
            "kl_coef": args.kl_coef > 0,
            "kl_penalty full": args.has_kl_loss and args.kl_penalty == "full",
            "use_vllm": args.use_vllm and args.vllm_importance_sampling_correction,
        }
        rules = [short_name(rule) for rule in active_rules(args)]
        needed = [*measurement.needed, *sorted(measurement.term_needs), *measurement.perturbations]
        return [*(name for name, is_on in options.items() if is_on), *needed, *rules]

    def _why_unusable(self, state: Mapping[str, Any]) -> str | None:
        """Return why this run cannot train on a saved buffer, or None if it can."""
        args = self._run.args
        if state["estimator"] != args.advantage_estimator:
            return f"advantage_estimator is {args.advantage_estimator}, and was {state['estimator']}"
        sizes = {len(group["advantages"]) for group in state["groups"]}
        if sizes - {args.num_generations}:
            return f"num_generations is {args.num_generations}, and its groups have {max(sizes)} completions"
        missing = [name for name in self._contents() if name not in state["contents"]]
        return f"it was stored without {' and '.join(missing)}" if missing else None
