"""What a reward function returned: a number or None for each completion, else an error that names the function."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from numbers import Real
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.answers.text import shown
from vgr_trl.rewards.time_limit import at_most
from vgr_trl.rewards.whole_groups import innermost, is_asynchronous

_CONTAINERS = (list, dict)


def checked(
    reward: Any,
    name: str,
    on_nan: Callable[[str, int], None],
    trainer: object = None,
    seconds: float | None = None,
) -> Callable[..., Any]:
    """Return `reward`, asynchronous if it is, such that it returns a list of floats and Nones or fails with its name.

    Args:
        reward: called with keywords only, `completions` among them.
        on_nan: called with the name and the number of NaN that the reward returned, if there are any.
        trainer: passed as `trainer` to a reward that takes it, by name or among `**kwargs`, and does not hand on its
            own; None: to none.
        seconds: that one call may take; None: any number. Asynchronous rewards, which limit themselves, may take any.
    """
    given = {"trainer": trainer} if trainer is not None and _takes(reward, "trainer") else {}
    if is_asynchronous(innermost(reward)):

        async def call_async(**kwargs: Any) -> list[float | None]:
            try:
                returned = await reward(**given | kwargs)
            except TypeError as error:
                if not _brings_its_own(error, given):
                    raise
                returned = await reward(**kwargs)
            return _read(returned, len(kwargs["completions"]), name, on_nan)

        return call_async

    def call(**kwargs: Any) -> list[float | None]:
        with at_most(seconds, name), _as_given(kwargs):
            try:
                returned = reward(**given | kwargs)
            except TypeError as error:
                if not _brings_its_own(error, given):
                    raise
                returned = reward(**kwargs)
            return _read(returned, len(kwargs["completions"]), name, on_nan)  # a generator computes here

    return call


@contextmanager
def _as_given(columns: dict[str, Any]) -> Iterator[None]:
    """After this block all lists and dicts in the columns are what they were: others read them too."""
    before = [(each, each.copy()) for each in _containers(list(columns.values()))]
    yield
    for each, items in before:
        each.clear()
        each.extend(items) if isinstance(each, list) else each.update(items)


def _containers(items: Iterable[Any]) -> Iterator[Any]:
    """The lists and dicts among `items`, and those in them; images and tensors are left alone."""
    for item in items:
        if isinstance(item, _CONTAINERS):
            yield item
            yield from _containers(item.values() if isinstance(item, dict) else item)


def _brings_its_own(error: TypeError, given: dict[str, Any]) -> bool:
    """Whether a wrapper with `**kwargs` hands on a trainer of its own; from now on it gets none."""
    if not given or "multiple values for keyword argument 'trainer'" not in str(error):
        return False
    given.clear()
    return True


def _takes(reward: Any, name: str) -> bool:
    """Whether a reward can be called with a keyword that no `functools.partial` has bound."""
    if name in getattr(reward, "keywords", {}):
        return False
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a built-in function without a signature
        return False
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _read(returned: Any, count: int, name: str, on_nan: Callable[[str, int], None]) -> list[float | None]:
    expected = f"return a list of one number per completion ({count}), None where it does not apply"
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__iter__"):
        raise RewardError(f"The reward {name} returned {shown(returned)} ({type(returned).__name__}): {expected}.")
    values = list(returned)
    if len(values) != count:
        raise RewardError(f"The reward {name} returned {len(values)} rewards: {expected}.")
    rewards = [_number(value, row, name) for row, value in enumerate(values)]
    if undefined := sum(reward is not None and math.isnan(reward) for reward in rewards):
        on_nan(name, undefined)
    return rewards


def _number(value: Any, row: int, name: str) -> float | None:
    if value is None:
        return None
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, Real):
        raise RewardError(
            f"The reward {name} returned {shown(value)} ({type(value).__name__}) for completion {row}: give a number, "
            "or None where it does not apply."
        )
    try:
        return float(number)
    except OverflowError:  # infinite rewards are refused by all processes together
        return math.inf if value > 0 else -math.inf
