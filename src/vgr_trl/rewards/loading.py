"""Load rewards by name or path, weight them by step, and check their results."""

import inspect
import logging
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

from vgr_trl import registries
from vgr_trl.rewards.answers import excerpt
from vgr_trl.rewards.attention import mdi_reward, region_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.groups import WholeGroups, unwrap_reward
from vgr_trl.rewards.reward_files import OVERALL, FileOptions, ScoredFile, is_easyr1_reward
from vgr_trl.rewards.simple import (
    accuracy_reward,
    blind_accuracy_reward,
    get_soft_overlong_punishment,
    tag_count_reward,
    think_format_reward,
    think_only_format_reward,
)
from vgr_trl.utils import ConfigError, RewardError

logger = logging.getLogger(__name__)

for _names, _reward in (
    (("accuracy", "accuracy_reward", "mc_idx_reward"), accuracy_reward),
    (("format", "think_format_reward"), think_format_reward),
    (("think_only_format", "think_only_format_reward"), think_only_format_reward),
    (("tag_count", "tag_count_reward"), tag_count_reward),
    (("vgr", "vgr_reward"), vgr_reward),
    (("vgr_hard_negative", "vgr_hard_negative_reward"), vgr_hard_negative_reward),
    (("mdi", "mdi_reward"), mdi_reward),
    (("region", "region_reward"), region_reward),
    (("blind_accuracy", "blind_accuracy_reward"), blind_accuracy_reward),
    (
        ("length", "soft_overlong", "soft_overlong_punishment_reward", "get_soft_overlong_punishment"),
        get_soft_overlong_punishment,
    ),
):
    registries.rewards.register(*_names)(_reward)
_HARD_NEGATIVES: dict[Any, Any] = {
    vgr_reward: vgr_hard_negative_reward,
    "vgr": "vgr_hard_negative",
    "vgr_reward": "vgr_hard_negative_reward",
}


def is_reward_name(spec: Any) -> bool:
    """Whether a text names a reward function (registered name, file or dotted path), not a reward model."""
    if not isinstance(spec, str) or Path(spec).is_dir():
        return False
    name = str(spec).strip().partition("[")[0]
    dotted = "." in name and all(part.isidentifier() for part in re.split("[.:]", name))
    return ".py:" in name or dotted or name in registries.rewards.names()


def load_rewards(
    specs: Iterable[Any],
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Callable[..., Any]]:
    """Load the reward functions that `specs` name, in order; arguments as in `load_reward`.

    Args:
        options: of all plug-ins of a run; each reward takes its own.

    Raises:
        RewardError: a reward cannot be loaded, or is named twice, so that its metrics would collide.
    """
    specs = [specs] if isinstance(specs, str) else list(specs)
    rewards = [_load(spec, options or {}, max_completion_length, soft_punish_cache, files) for spec in specs]
    first: dict[Any, ScoredFile] = {}
    for place, reward in enumerate(rewards):
        if reward in rewards[:place] or specs[place] in specs[:place]:
            raise RewardError(f"The reward {specs[place]} is named twice: name it once, with a larger weight.")
        if isinstance(reward, ScoredFile):  # call the function once for all its scores
            reward.computed = first.setdefault(reward.function, reward).computed
    return rewards


def load_reward(
    spec: Any,
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Load the reward function that `spec` names.

    Args:
        spec: a name (`accuracy`, `format`, `length`, or one that an installed package registers as entry point of the
            group `vgr_trl.rewards`), a dotted path `my_package.rewards.my_reward`, or a file
            `my_rewards.py:my_reward`, relative to the working directory or absolute. A function is returned unchanged
            unless `options` are given. An EasyR1 function gives the score `overall`; append `[accuracy]` for another
            score.
        max_completion_length: tokens, for `length`.
        soft_punish_cache: tokens, for `length`; None: a fifth of `max_completion_length`, the ratio of DAPO
            (https://huggingface.co/papers/2503.14476).
        files: how EasyR1 functions are called; None: as their files say.
        options: values of the options that the reward declares, by name.

    Raises:
        RewardError: the name is unknown or registered twice, the import fails, the object is not a function, or the
            reward declares no such option.
    """
    reward = _load(spec, options or {}, max_completion_length, soft_punish_cache, files)
    own = getattr(reward, "options", None)
    known = [] if own is None else [field.name for field in fields(own)]
    for name in options or ():
        if name not in known:
            accepted = ", ".join(known) or "none, as it declares none"
            raise RewardError(f"The reward {reward_name(reward)} has no option {name!r}: give {accepted}.")
    return reward


def _load(
    spec: Any, options: Mapping[str, Any], longest: int | None, cache: int | None, files: FileOptions | None
) -> Callable[..., Any]:
    name, key = spec, ""
    if isinstance(spec, str):
        name, _, key = spec.strip().removesuffix("]").partition("[")
    reward: Callable[..., Any] = registries.rewards.load(name)
    if is_easyr1_reward(reward) and isinstance(spec, str):
        return ScoredFile(reward, key or OVERALL, files or FileOptions())
    if key:
        raise RewardError(f"The reward {spec!r} asks for a score, but {name} returns one number: remove [{key}].")
    if reward is get_soft_overlong_punishment:
        if longest is None:
            raise RewardError(f"The reward {name!r} needs max_completion_length, which is None: give it in tokens.")
        return get_soft_overlong_punishment(longest, longest // 5 if cache is None else cache)
    return reward if reward is spec and not options else _bind_options(reward, options)


def _bind_options(reward: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind the options that a reward declares as keyword arguments."""
    options = getattr(reward, "options", None)
    if options is None:
        return reward
    filled = partial(reward, **vars(registries.build_options(options, given)))

    @wraps(reward)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return filled(*args, **kwargs)

    bound.__signature__ = inspect.signature(filled)  # type: ignore[attr-defined]
    return bound


def replace_by_hard_negative(rewards: Iterable[Any]) -> list[Any]:
    """Replace `vgr` with `vgr_hard_negative` among reward functions or names.

    Raises:
        RewardError: neither is among them.
    """
    rewards = list(rewards)
    changed = [_HARD_NEGATIVES.get(reward, reward) for reward in rewards]
    if not set(changed) & set(_HARD_NEGATIVES.values()):
        names = " ".join(map(reward_name, rewards)) or "none"
        raise RewardError(f"vgr_hard_negative is on, but the rewards are {names}: add vgr, or turn it off.")
    return changed


def reward_name(reward: Any) -> str:
    """Return the name of a reward function, or of a reward model given as a path or a model."""
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    name = getattr(reward, "__name__", None)
    if name is None and (path := getattr(getattr(reward, "config", None), "_name_or_path", None)):
        return str(path).split("/")[-1]
    return name or type(reward).__name__


@dataclass(frozen=True)
class RewardSchedule:
    """Reward weights, one per reward: `early` for the first steps if given, then `regular`."""

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
            numbers = [each for each in weights or () if isinstance(each, int | float) and math.isfinite(each)]
            if weights is not None and not len(weights) == len(numbers) == len(names):
                raise ConfigError(
                    f"{option} is {weights!r}, {len(weights)} values, but there are {len(names)} reward functions "
                    f"({', '.join(names)}): give one weight per function, a finite number, in this order."
                )
        regular = [1.0] * len(names) if reward_weights is None else reward_weights
        early = None if early_reward_weights is None else tuple(map(float, early_reward_weights))
        return cls(tuple(map(float, regular)), early)

    @property
    def changes(self) -> bool:
        """Whether the weights depend on the step."""
        return self.early is not None and self.early != self.regular

    def early_steps(self, warmup_steps: int, total_steps: int) -> int:
        """Return the number of steps with early weights: the warm-up, else 10 % of all steps, rounded up."""
        return int(warmup_steps) if warmup_steps > 0 else max(-(-int(total_steps) // 10), 0)

    def weights_at(self, step: int, early_steps: int) -> list[float]:
        """Return the weights at the 0-based global `step`: early ones below `early_steps`, else regular ones."""
        return list(self.early if self.early is not None and step < early_steps else self.regular)


HANGING_ADVICE = (
    "The call is never interrupted: stop the run (Ctrl-C, or SIGKILL), add a timeout inside the reward, and continue "
    "with resume_from_checkpoint latest."
)
PASSED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def reads_solution(reward: Any) -> bool:
    """Whether a reward compares answers with the reference answer."""
    return unwrap_reward(reward) in (accuracy_reward, blind_accuracy_reward)


def check_callable(reward: Any, columns: Iterable[str]) -> None:
    """Raise `RewardError` if calling `reward` with the data's columns must fail, or can only return None.

    Args:
        reward: a reward function; reward models are not checked.
        columns: names of the data columns.
    """
    columns, name = list(columns), reward_name(reward)
    missing = [each for each in getattr(reward, "required", ()) if each not in {*columns, *PASSED_COLUMNS}]
    if reads_solution(reward) and not {"solution", "label_idx"} & set(columns):
        missing = ["solution"]
    if missing:
        raise RewardError(f"The reward {name} needs the column {missing[0]!r}, but the data have {columns}: add it.")
    if isinstance(reward, WholeGroups) or not callable(reward) or hasattr(reward, "forward"):
        return
    try:
        passed = dict.fromkeys([*PASSED_COLUMNS, *columns])
        inspect.signature(reward).bind(**{key: None for key in passed if key not in ("prompt", "completion")})
    except TypeError as error:
        raise RewardError(
            f"The reward {name} cannot be called with the arguments it gets ({error}): accept `completions`, the "
            f"columns that it uses (of {columns}), and **kwargs."
        ) from error


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
    given = {"trainer": trainer} if trainer is not None and _takes_argument(reward, "trainer") else {}
    function = unwrap_reward(reward)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        async def call_async(**kwargs: Any) -> list[float | None]:
            return _parse_rewards(await reward(**given | kwargs), len(kwargs["completions"]), name, on_nan)

        return call_async

    def call(**kwargs: Any) -> list[float | None]:
        with _report_hanging(seconds, name, kwargs), _restore_columns(kwargs):
            returned = reward(**given | kwargs)  # may be a generator: parsed, and so run, inside of these contexts
            return _parse_rewards(returned, len(kwargs["completions"]), name, on_nan)

    return call


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
            logger.warning(
                f"The reward {name} has not returned for {times} x reward_timeout={seconds:g} seconds. It was called "
                f"with {len(rows)} completions, of the rows {rows[0]!r} to {rows[-1]!r}. Its stack:\n"
                f"{stack}{HANGING_ADVICE * (times >= 10)}"
            )

    if seconds is not None:
        threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def _restore_columns(columns: dict[str, Any]) -> Iterator[None]:
    """Restore all lists and dicts in the columns after this block, since other rewards read them too."""
    before = [(each, each.copy()) for each in _find_containers(list(columns.values()))]
    yield
    for each, items in before:
        each.clear()
        each.extend(items) if isinstance(each, list) else each.update(items)


def _find_containers(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the lists and dicts in `items`, recursively; images and tensors are skipped."""
    for item in items:
        if isinstance(item, list | dict):
            yield item
            yield from _find_containers(item.values() if isinstance(item, dict) else item)


def _takes_argument(reward: Any, name: str) -> bool:
    """Whether a reward accepts a keyword argument that `functools.partial` has not bound."""
    if name in getattr(reward, "keywords", {}):
        return False
    parameters = inspect.signature(reward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _parse_rewards(returned: Any, count: int, name: str, on_nan: Callable[[str, int], None]) -> list[float | None]:
    try:
        rewards = [None if value is None else float(value) for value in returned]
        if isinstance(returned, str | Mapping | Set) or len(rewards) != count:
            raise ValueError(f"{len(rewards)} rewards")
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"The reward {name} returned {excerpt(returned)} ({type(returned).__name__}; {error}): return a list of "
            f"one number per completion ({count}), None where it does not apply."
        ) from error
    if undefined := sum(reward is not None and math.isnan(reward) for reward in rewards):
        on_nan(name, undefined)
    return rewards
