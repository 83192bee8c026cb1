"""Rewards that compare the completions of a prompt, also if its group spans several processes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vgr_trl.utils import RewardError

Gather = Callable[[list[Any]], list[Any]]
Reward = TypeVar("Reward", bound=Callable[..., Any])


def needs_whole_groups(*columns: str, optional: Sequence[str] = ()) -> Callable[[Reward], Reward]:
    """Return a decorator that marks a reward as needing all completions of a prompt at once.

    The marked function must be pure and take (completions, *columns, num_generations, **kwargs) of whole groups, in the
    order of the prompts. The trainer gathers its arguments over the processes and keeps the local slice of the result.

    Args:
        columns: required per-row columns besides `completions`; `completion_ids` is allowed, images are not.
        optional: columns that the reward uses if the data have them.
    """

    def mark(reward: Any) -> Any:
        reward.whole_group_columns = columns, tuple(optional)
        return reward

    return mark


def needed_columns(reward: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the required and optional columns of a reward marked by `needs_whole_groups`; None if it is not."""
    while hasattr(reward, "func") and not hasattr(reward, "whole_group_columns"):
        reward = reward.func
    return getattr(reward, "whole_group_columns", None)


def unwrap_reward(reward: Any) -> Any:
    """Return the function inside `functools.partial` and similar wrappers."""
    while hasattr(reward, "func"):
        reward = reward.func
    return reward


class WholeGroups:
    """Adapter that TRL calls with the rows of one process and that computes the reward on whole groups.

    Args:
        reward: a function marked by `needs_whole_groups`.
        gather: concatenates one list per process, in the order of the processes, on every process.
        process_index: index of this process.
        num_generations: completions per prompt, or a function that returns it at each call; None: the reward is called
            with an argument or column `num_generations`.

    Raises:
        RewardError: the reward is not marked.
    """

    def __init__(
        self,
        reward: Callable[..., Any],
        gather: Gather,
        process_index: int,
        num_generations: int | Callable[[], int] | None = None,
    ) -> None:
        self.__name__ = str(getattr(reward, "__name__", None) or unwrap_reward(reward).__name__)
        if (columns := needed_columns(reward)) is None:
            raise RewardError(
                f"{self.__name__} is not marked as needing whole groups: decorate it with needs_whole_groups."
            )
        self.required, self.optional = columns
        self.reward, self.gather, self.num_generations = reward, gather, num_generations
        self.process_index = process_index

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Return the rewards of the local completions; every process gathers exactly once, also without rows."""
        own = {name: list(kwargs[name]) for name in (*self.required, *self.optional) if kwargs.get(name) is not None}
        parts = self.gather([(list(completions), own)])
        for process, (_, columns) in enumerate(parts):
            if missing := [name for name in self.required if name not in columns]:
                raise RewardError(
                    f"On process {process} {self.__name__} lacks the column {missing[0]!r}: add it to the rows."
                )
        arguments: dict[str, Any] = {
            name: [value for rows, columns in parts for value in columns.get(name, [None] * len(rows))]
            for name in sorted({name for _, columns in parts for name in columns})
        }
        everything = [completion for rows, _ in parts for completion in rows]
        start = sum(len(rows) for rows, _ in parts[: self.process_index])
        here = slice(start, start + len(completions))
        arguments |= {name: kwargs[name] for name in ("trainer_state", "log_metric") if name in kwargs}
        if (log_extra := kwargs.get("log_extra")) is not None:
            arguments["log_extra"] = lambda column, values: log_extra(column, list(values)[here])
        size = kwargs.get("num_generations")
        if size is None:
            size = self.num_generations() if callable(self.num_generations) else self.num_generations
        size = group_size(len(everything), size)
        rewards = list(self.reward(completions=everything, num_generations=size, **arguments))
        if len(rewards) != len(everything):
            raise RewardError(
                f"{self.__name__} returned {len(rewards)} rewards for {len(everything)} completions: return one per "
                "completion, None where it does not apply."
            )
        return rewards[here]


gather_groups = WholeGroups


def group_size(count: int, num_generations: Any) -> int:
    """Return the completions per prompt from an int or a column of equal ints.

    Args:
        count: completions, over all processes.
        num_generations: as TRL passes it, or as a column of the data.

    Raises:
        RewardError: the completions are not whole groups.
    """
    sizes = {num_generations} if num_generations is None or isinstance(num_generations, int) else {*num_generations}
    if not count and not sizes:
        return 1
    size = int(sizes.pop() or 0) if len(sizes) == 1 else 0
    if size < 1 or count % size:
        raise RewardError(
            f"There are {count} completions over all processes with num_generations {num_generations}: give the "
            "number of completions per prompt, which divides them."
        )
    return size
