"""Rewards that compare the completions of a prompt, also if its group is spread over processes; limits of time."""

import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from vgr_trl.utils import RewardError

Gather = Callable[[list[Any]], list[Any]]
Reward = TypeVar("Reward", bound=Callable[..., Any])

_REQUIRED, _OPTIONAL = "whole_group_columns", "whole_group_optional_columns"
_NEVER_GATHERED = ("image", "images", "prompts")


def needs_whole_groups(*columns: str, optional: Sequence[str] = ()) -> Callable[[Reward], Reward]:
    """Return a decorator that marks a reward as needing all completions of a prompt at once.

    The marked function is pure and takes (completions, *columns, num_generations, **kwargs) of whole groups, in the
    order of the prompts; the trainer gathers these over the processes and takes the local slice of what it returns.

    Args:
        columns: per-row columns that it needs besides `completions`; `completion_ids` may be one, images may not.
        optional: columns that it uses if there are any.

    Raises:
        RewardError: a column holds images, the function is asynchronous, or the parentheses are missing.
    """
    if any(map(callable, columns)):
        raise RewardError("A reward is decorated with @needs_whole_groups: write @needs_whole_groups(), with columns.")
    for column in (*columns, *optional):
        if column in _NEVER_GATHERED:
            raise RewardError(
                f"A reward needs the column {column!r} of whole groups, but images are never gathered: name columns of "
                "numbers or text."
            )

    def mark(reward: Reward) -> Reward:
        if is_asynchronous(innermost(reward)):
            raise RewardError(
                f"{_name(reward)} is asynchronous, which rewards of whole groups cannot be: all processes gather in "
                "the same order, so make it an ordinary function."
            )
        setattr(reward, _REQUIRED, tuple(columns))
        setattr(reward, _OPTIONAL, tuple(optional))
        return reward

    return mark


def needed_columns(reward: Any) -> tuple[str, ...] | None:
    """Return the columns that `reward` needs of whole groups; None if it was not marked as needing whole groups."""
    return getattr(_marked(reward), _REQUIRED, None)


def _marked(reward: Any) -> Any:
    while hasattr(reward, "func") and not hasattr(reward, _REQUIRED):
        reward = reward.func
    return reward


def _name(reward: Any) -> str:
    return str(getattr(reward, "__name__", None) or getattr(_marked(reward), "__name__", type(reward).__name__))


def innermost(reward: Any) -> Any:
    """Return the function within `functools.partial` and its like."""
    while hasattr(reward, "func"):
        reward = reward.func
    return reward


def is_asynchronous(called: Any) -> bool:
    """Whether calling a function, or an object, gives something to wait for."""
    return any(map(inspect.iscoroutinefunction, (called, getattr(called, "__call__", None))))  # noqa: B004


class WholeGroups:
    """A reward as TRL calls it, with the rows of this process, that computes on whole groups.

    Args:
        reward: a function marked by `needs_whole_groups`.
        gather: takes a list per process and returns their concatenation in the order of the processes, everywhere.
        process_index: this process, in [0, num_processes).
        num_processes: how many call the reward together.
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
        num_processes: int = 1,
        num_generations: int | Callable[[], int] | None = None,
    ) -> None:
        self.__name__ = _name(reward)
        if needed_columns(reward) is None:
            raise RewardError(
                f"{self.__name__} is not marked as needing whole groups: decorate it with needs_whole_groups."
            )
        self.reward, self.gather, self.num_generations = reward, gather, num_generations
        self.process_index, self.num_processes = process_index, num_processes
        self.required: tuple[str, ...] = getattr(_marked(reward), _REQUIRED)
        self.optional: tuple[str, ...] = getattr(_marked(reward), _OPTIONAL, ())

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Return the rewards of the local completions; gathers twice, on every process, whatever the rows are."""
        columns = {name: kwargs[name] for name in (*self.required, *self.optional) if kwargs.get(name) is not None}
        missing = next((name for name in self.required if name not in columns), None)
        with without_limit():
            states = self.gather([(len(completions), missing, sorted(columns))])
        if len(states) != self.num_processes:
            raise RewardError(
                f"{self.__name__} got rows from {len(states)} processes, but there are {self.num_processes}: call it "
                "on every process, with a gather function that reaches all."
            )
        for index, (_, missing, _) in enumerate(states):
            if missing is not None:
                raise RewardError(
                    f"On process {index} {self.__name__} needs the column {missing!r}, which the rows lack: add it."
                )
        present = sorted({name for _, _, names in states for name in names})
        absent = [None] * len(completions)
        with without_limit():
            rows = self.gather(list(zip(completions, *(columns.get(name, absent) for name in present), strict=True)))
        lengths = [length for length, _, _ in states]
        start = sum(lengths[: self.process_index])
        return self._compute(rows, present, slice(start, start + lengths[self.process_index]), kwargs)

    def _compute(self, rows: list[Any], present: list[str], here: slice, kwargs: dict[str, Any]) -> list[float | None]:
        size = kwargs.get("num_generations")
        if size is None:
            size = self.num_generations() if callable(self.num_generations) else self.num_generations
        size = read_num_generations(size)
        if size is None or size < 1 or len(rows) % size:
            raise RewardError(
                f"{self.__name__} got {len(rows)} completions with num_generations {size}: pass the number of "
                "completions per prompt, which divides the number of completions over all processes."
            )
        arguments: dict[str, Any] = {name: [row[i + 1] for row in rows] for i, name in enumerate(present)}
        arguments |= {name: kwargs[name] for name in ("trainer_state", "log_metric") if name in kwargs}
        if (log_extra := kwargs.get("log_extra")) is not None:
            arguments["log_extra"] = lambda column, values: log_extra(column, list(values)[here])
        rewards = self.reward(completions=[row[0] for row in rows], num_generations=size, **arguments)
        if len(rewards) != len(rows):
            raise RewardError(
                f"{self.__name__} returned {len(rewards)} rewards for {len(rows)} completions: return one per "
                "completion, None where it does not apply."
            )
        return list(rewards[here])


gather_groups = WholeGroups


def read_num_generations(value: Any) -> int | None:
    """Return the completions per prompt from an int or a column of equal ints; None for None or an empty column.

    Raises:
        RewardError: the column has different values.
    """
    if value is None or isinstance(value, int):
        return value
    if not hasattr(value, "__len__"):
        return int(value)
    sizes = {int(size) for size in value}
    if len(sizes) > 1:
        raise RewardError(f"num_generations has the values {sorted(sizes)}: give the same number for every completion.")
    return sizes.pop() if sizes else None


_INTERVAL = 0.1  # seconds between two looks at the clock, and between two interruptions
_running: "_Watchdog | None" = None


class _TimeUp(BaseException):
    """No `Exception`, which a reward may catch."""


class _Watchdog(threading.Thread):
    """Interrupts the main thread once the time is up, and again until it is stopped: the reward may catch everything.

    The signal is one that nothing else uses. SIGALRM is that of math-verify, and of a reward's own `signal.alarm`.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.end, self.time_is_up = time.monotonic() + seconds, False
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(_INTERVAL):
            if time.monotonic() >= self.end:
                self.time_is_up = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.time_is_up and not self.stopped.is_set():
            raise _TimeUp


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def at_most(seconds: float | None, name: str) -> Iterator[None]:
    """Interrupt what this block waits for or computes in Python, as often as it goes on.

    Not interrupted is a single call of C code that keeps the interpreter to itself: a regular expression, say.

    Args:
        seconds: the limit, above 0; None: there is none, nor outside of the main thread, where Python takes no
            signals.
        name: of the reward.

    Raises:
        RewardError: the limit is reached, whatever the block has made of the interruption.
    """
    global _running
    if seconds is None or not _is_main_thread():
        yield
        return
    watchdog = _running = _Watchdog(seconds)
    before = signal.signal(signal.SIGURG, watchdog.interrupt)
    watchdog.start()
    try:
        try:
            yield
        finally:
            watchdog.stopped.set()
    except BaseException:
        if not watchdog.time_is_up:
            raise
    finally:
        watchdog.stopped.set()  # the first time may have been interrupted
        signal.signal(signal.SIGURG, before)
        _running = None
    if watchdog.time_is_up:
        raise RewardError(
            f"The reward {name} has not returned within reward_timeout={seconds:g} seconds: correct it, or allow more."
        )


@contextmanager
def without_limit() -> Iterator[None]:
    """Let the limit stand still: while other processes are waited for, which have their own, or for cleaning up."""
    watchdog = _running if _is_main_thread() else None
    if watchdog is None:
        yield
        return
    began, end, watchdog.end = time.monotonic(), watchdog.end, float("inf")
    try:
        yield
    finally:
        watchdog.end = end + time.monotonic() - began
