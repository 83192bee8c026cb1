"""Call rewards: their arguments, their errors, what they return, and their weights by step."""

import inspect
import logging
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from vgr_trl.errors import ConfigError, RewardError, VGRError, error_text
from vgr_trl.rewards.answers import completion_text, excerpt, usable_solution
from vgr_trl.rewards.functions import WholeGroups, accuracy_reward, blind_accuracy_reward, tool_reward, unwrap_reward

if TYPE_CHECKING:  # data and command lines read rewards without torch
    from torch import Tensor

logger = logging.getLogger(__name__)


def reward_name(reward: Any) -> str:
    """Return the name of a reward function, or of a reward model given as a path or a model."""
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    name = getattr(reward, "__name__", None)
    if name is None and (path := getattr(getattr(reward, "config", None), "_name_or_path", None)):
        return str(path).split("/")[-1]
    return name or type(reward).__name__


# Metric: the mean reward under `reward_weights`, logged while `early_reward_weights` hold too.
LATE_REWARD = "reward_late_weights"


@dataclass(frozen=True)
class RewardSchedule:
    """Reward weights, one per reward: `early` weights for the first steps if given, then `regular` weights."""

    regular: tuple[float, ...]
    early: tuple[float, ...] | None = None

    @classmethod
    def for_rewards(
        cls,
        rewards: Sequence[Any],
        reward_weights: Sequence[float] | None = None,
        early_reward_weights: Sequence[float] | None = None,
    ) -> "RewardSchedule":
        """Build the schedule for `rewards`, in their order.

        Args:
            reward_weights: one finite weight per reward; None: 1 each.
            early_reward_weights: one finite weight per reward, for the early steps; None: `reward_weights` always.

        Raises:
            ConfigError: the number of weights differs from the number of rewards, or a weight is not finite.
        """
        names = [reward_name(reward) for reward in rewards]
        for option, weights in (("reward_weights", reward_weights), ("early_reward_weights", early_reward_weights)):
            if weights is not None and (len(weights) != len(names) or not all(map(math.isfinite, weights))):
                functions = f"{len(weights)} values, but there are {len(names)} reward functions ({', '.join(names)})"
                raise ConfigError(f"{option} is {weights!r}, {functions}: give a finite number for each, in order.")
        regular = [1.0] * len(names) if reward_weights is None else reward_weights
        return cls(tuple(regular), None if early_reward_weights is None else tuple(early_reward_weights))

    @property
    def changes(self) -> bool:
        """Whether the weights depend on the step."""
        return self.early is not None and self.early != self.regular

    def early_steps(self, warmup_steps: int, total_steps: int) -> int:
        """Return the number of steps with early weights: the warm-up, else 10 % of all steps, rounded up."""
        return int(warmup_steps) if warmup_steps > 0 else max(-(-int(total_steps) // 10), 0)

    def weights_at(self, step: int, early_steps: int) -> list[float]:
        """Return the weights at the 0-based global `step`: early weights below `early_steps`, else regular weights."""
        return list(self.early if self.early is not None and step < early_steps else self.regular)


HANGING_ADVICE = "It is never interrupted: stop the run, add a timeout inside the reward, and resume from latest."
PASSED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def reads_solution(reward: Any) -> bool:
    """Return whether a reward compares answers with the reference answer."""
    return unwrap_reward(reward) in (accuracy_reward, blind_accuracy_reward, tool_reward)


def may_read_columns(reward: Any) -> bool:
    """Return whether a reward of the user's own accepts any column or the trainer, so that its reads are unknown."""
    return not (is_from(reward, "vgr_trl", "trl") or is_model(reward)) and _takes_argument(reward, "trainer")


def is_model(reward: Any) -> bool:
    """Return whether a reward is a reward model, which TRL calls itself."""
    return hasattr(reward, "forward")


def is_from(reward: Any, *packages: str) -> bool:
    """Return whether the function of a reward is from one of these packages."""
    return str(unwrap_reward(reward).__module__).partition(".")[0] in packages


def check_callable(reward: Any, columns: Iterable[str]) -> None:
    """Raise `RewardError` if calling `reward` with the data's columns must fail, or can only return None.

    Args:
        reward: a reward function; reward models are not checked.
        columns: names of the data columns.
    """
    columns, name = list(columns), reward_name(reward)
    required = reward.required if isinstance(reward, WholeGroups) else ()
    missing = [column for column in required if column not in {*columns, *PASSED_COLUMNS}]
    if reads_solution(reward) and not {"solution", "label_idx"} & set(columns):
        missing = ["solution"]
    if missing:
        raise RewardError(f"The reward {name} needs the column {missing[0]!r}, but the data have {columns}: add it.")
    if isinstance(reward, WholeGroups) or not callable(reward) or is_model(reward):
        return
    try:
        indices = ["label_idx"] * ({"choices", "solution"} <= {*columns} and _names_argument(reward, "label_idx"))
        arguments = dict.fromkeys([*PASSED_COLUMNS, *columns, *indices])
        inspect.signature(reward).bind(**{key: None for key in arguments if key not in ("prompt", "completion")})
    except TypeError as error:
        shown = [column for column in columns if not column.startswith("__")]  # the others are our own
        uncallable = f"The reward {name} cannot be called with the arguments it gets ({error})"
        raise RewardError(f"{uncallable}: accept completions, columns of {shown}, and **kwargs.") from error


def wrap_reward(
    reward: Any, name: str, on_nan: Callable[[str, int], None], trainer: object = None, seconds: float | None = None
) -> Callable[..., Any]:
    """Wrap a reward, synchronous or not, so that it returns a list of floats and Nones, or an error with its name.

    Args:
        reward: called with keyword arguments only, including `completions`.
        on_nan: called with the name and the number of NaN rewards, if there are any.
        trainer: passed as `trainer` to rewards that accept it; None: not passed.
        seconds: interval at which a synchronous call that has not returned is reported; None: never.
    """
    extra = {"trainer": trainer} if trainer is not None and _takes_argument(reward, "trainer") else {}
    function = unwrap_reward(reward)
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):

        async def call_async(**kwargs: Any) -> list[float | None]:
            count = len(kwargs["completions"])  # before the reward can change them
            with _naming_reward(name):
                return _parse_rewards(await reward(**extra | fit_arguments(reward, kwargs)), count, name, on_nan)

        return call_async

    def call(**kwargs: Any) -> list[float | None]:
        count = len(kwargs["completions"])
        with _report_hanging(seconds, name, kwargs), _restore_columns(kwargs), _naming_reward(name):
            # May be a generator: parsed, and so run, inside of these contexts.
            returned = reward(**extra | fit_arguments(reward, kwargs))
            return _parse_rewards(returned, count, name, on_nan)

    return call


def fit_arguments(reward: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """Return a reward's arguments: completions of its declared type, and `label_idx` if it is named and can be made."""
    if getattr(unwrap_reward(reward), "completion_type", None) is str:
        columns = {**columns, "completions": [*map(completion_text, columns["completions"])]}
    is_known = "label_idx" not in columns and {"choices", "solution"} <= columns.keys()
    if not is_known or not _names_argument(reward, "label_idx"):
        return columns
    pairs = zip(columns["solution"], columns["choices"], strict=True)
    read = [usable_solution({"solution": right, "choices": choices}) if choices else None for right, choices in pairs]
    return {**columns, "label_idx": [right and right.index for right in read]}


@contextmanager
def _naming_reward(name: str) -> Iterator[None]:
    """Turn every exception of a reward, `SystemExit` too, into a `RewardError` with its name."""
    try:
        yield
    except VGRError:
        raise
    except (Exception, SystemExit) as error:
        if re.search("gloo|NCCL", str(error)):  # another process has ended while rewards are gathered
            raise
        raised = f"The reward {name} raised {type(error).__name__}: {error_text(error)}"
        raise RewardError(f"{raised}. Return None where it does not apply.") from error


@contextmanager
def _report_hanging(seconds: float | None, name: str, columns: Mapping[str, Any]) -> Iterator[None]:
    """Log reward, rows and stack every `seconds` until this block ends.

    The call is not interrupted: an exception raised from outside can leave a lock held or a file half written. The
    stack is read while holding the interpreter lock: faulthandler does not wait for the lock and can crash the process.
    A call of C code that keeps the lock is reported once it returns.
    """
    done, thread = threading.Event(), threading.get_ident()

    def report() -> None:
        rows = [str(row)[-80:] for row in columns.get("id") or columns.get("prompts") or columns["completions"]]
        for times in count(1):
            if done.wait(seconds) or (frame := sys._current_frames().get(thread)) is None:
                return
            stack = "".join(traceback.format_stack(frame, limit=20))
            late = f"The reward {name} has not returned for {times} x reward_timeout={seconds:g} seconds"
            got = f"{len(rows)} completions, of the rows {rows[0]!r} to {rows[-1]!r}"
            logger.warning(f"{late}. It got {got}. Its stack:\n{stack}{HANGING_ADVICE * (times >= 10)}")

    if seconds is not None:
        threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def _restore_columns(columns: dict[str, Any]) -> Iterator[None]:
    """Restore all lists and dicts in the columns after this block, since other rewards read them too."""
    before = [(container, container.copy()) for container in _find_containers(list(columns.values()))]
    yield
    for container, items in before:
        container.clear()
        container.extend(items) if isinstance(container, list) else container.update(items)


def _find_containers(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the lists and dicts in `items` recursively, but no images and tensors."""
    for item in items:
        if isinstance(item, list | dict):
            yield item
            yield from _find_containers(item.values() if isinstance(item, dict) else item)


def _takes_argument(reward: Any, name: str) -> bool:
    """Return whether a reward accepts a keyword argument that `functools.partial` has not bound."""
    if isinstance(reward, partial) and name in reward.keywords:
        return False
    parameters = inspect.signature(reward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _names_argument(reward: Any, name: str) -> bool:
    return name in inspect.signature(reward).parameters


def _parse_rewards(returned: Any, count: int, name: str, on_nan: Callable[[str, int], None]) -> list[float | None]:
    try:
        values = list(returned)
        rewards = [None if value is None else float(value) for value in values]
        if any(isinstance(value, str | bytes | bytearray) for value in (returned, *values)):
            raise TypeError("text is no number")
        if isinstance(returned, Mapping | Set) or len(rewards) != count:
            raise ValueError(f"{len(rewards)} rewards")
    except (TypeError, ValueError, OverflowError) as error:
        wrong = f"The reward {name} returned {excerpt(returned)} ({type(returned).__name__}; {error})"
        raise RewardError(f"{wrong}: return a list of {count} numbers, None where it does not apply.") from error
    if undefined := sum(reward is not None and math.isnan(reward) for reward in rewards):
        on_nan(name, undefined)
    return rewards


@dataclass(eq=False)
class RewardCalls:
    """The rewards of a trainer, and warnings about what they return, each logged once.

    Attributes:
        functions: returns the rewards, also models, of which the last one may be the KL; a user may replace them.
        names: name of each.
        num_tasks: rewards before the KL.
        wrap: `wrap_reward`, given a reward, its name and `on_nan`.
    """

    functions: Callable[[], Sequence[Any]]
    names: Sequence[str]
    num_tasks: int
    wrap: Callable[..., Any] = wrap_reward
    _with_nan: set[str] = field(default_factory=set)
    _first: list[list[list[float]]] = field(default_factory=list)  # rewards of the first two rollouts, by function

    def wrapped(self, alone: bool) -> list[Any]:
        """Return the rewards, which then return one number or None per completion, or raise an error with their name.

        Args:
            alone: whether a prompt has one completion. Rewards that compare a group are 0, or None beside others.
        """
        functions = self.functions()
        tasks = functions[: self.num_tasks]
        value = 0.0 if all(isinstance(reward, WholeGroups) for reward in tasks) else None
        called: list[Any] = []
        for reward, name in zip(functions, self.names, strict=True):
            if not is_model(reward):
                function = partial(_repeat, value) if alone and isinstance(reward, WholeGroups) else reward
                reward = self.wrap(function, name, self._warn_of_nan)
            called.append(reward)
        return called

    def count_undefined(self, rewards: "Tensor") -> dict[str, float]:
        """Count rewards that do not apply (NaN), as metrics; `rewards` is (N of all processes, F)."""
        metrics = {}
        for reward, name, undefined in zip(self.functions(), self.names, rewards.isnan().T, strict=True):
            metrics[f"rewards/{name}/not_applicable"] = undefined.float().mean().item()
            if is_model(reward) and undefined.any():
                self._warn_of_nan(name, int(undefined.sum()))
        return metrics

    def warn_of_constants(self, rewards: "Tensor", completion: Any, columns: Iterable[str]) -> None:
        """Name the user's rewards that were one number in the first two rollouts, and an example of their inputs."""
        if len(self._first) == 2:
            return
        self._first.append(rewards.T.tolist())
        for reward, name, *values in zip(self.functions(), self.names, *self._first, strict=True):
            value, *further = chain(*values)
            is_constant = len(self._first) == 2 and all(later == value for later in (value, *further))  # NaN is not
            if is_constant and not is_from(reward, "vgr_trl", "trl"):
                shown = ", ".join(column for column in columns if not column.startswith("__"))
                got = f"the completion {excerpt(completion)} and the columns {shown}, among others"
                logger.warning(f"The reward {name} was always {value:g}: check that it reads {got}.")

    def _warn_of_nan(self, name: str, count: int) -> None:
        if name not in self._with_nan:
            self._with_nan.add(name)
            effect = f"they count as not applicable, as None does (metric rewards/{name}/not_applicable; logged once)"
            cure = "Return None where a reward does not apply"
            logger.warning(f"The reward {name} returned NaN for {count} completions: {effect}. {cure}.")


def _repeat(value: float | None, completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [value] * len(completions)
