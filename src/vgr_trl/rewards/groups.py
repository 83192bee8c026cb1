"""Rewards that compare the completions of a prompt, also if its group is spread over processes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vgr_trl.utils import RewardError

Gather = Callable[[list[Any]], list[Any]]
Reward = TypeVar("Reward", bound=Callable[..., Any])


def needs_whole_groups(*columns: str, optional: Sequence[str] = ()) -> Callable[[Reward], Reward]:
    """Return a decorator that marks a reward as needing all completions of a prompt at once.

    The marked function is pure and takes (completions, *columns, num_generations, **kwargs) of whole groups, in the
    order of the prompts; the trainer gathers these over the processes and takes the local slice of what it returns.

    Args:
        columns: per-row columns that it needs besides `completions`; `completion_ids` may be one, images may not.
        optional: columns that it uses if there are any.
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
    """Return the function within `functools.partial` and its like."""
    while hasattr(reward, "func"):
        reward = reward.func
    return reward


class WholeGroups:
    """A reward as TRL calls it, with the rows of this process, that computes on whole groups.

    Args:
        reward: a function marked by `needs_whole_groups`.
        gather: takes a list per process and returns their concatenation in the order of the processes, everywhere.
        process_index: this process, of those that call the reward together.
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
        """Return the rewards of the local completions; gathers once, on every process, whatever the rows are."""
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
        RewardError: they are not those of whole groups.
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
