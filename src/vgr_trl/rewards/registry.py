"""Rewards by name: those of this library and of installed packages, dotted paths, and files."""

import inspect
import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.accuracy import accuracy_reward
from vgr_trl.rewards.attention import mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.format import tag_count_reward, think_format_reward
from vgr_trl.rewards.imports import import_file, import_module
from vgr_trl.rewards.length import get_soft_overlong_punishment
from vgr_trl.rewards.scored_files import OVERALL, FileOptions, is_scored, scored_reward, share_scores

ENTRY_POINTS = "vgr_trl.rewards"
REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy_reward,
    "accuracy_reward": accuracy_reward,
    "format": think_format_reward,
    "think_format_reward": think_format_reward,
    "tag_count": tag_count_reward,
    "tag_count_reward": tag_count_reward,
    "vgr": vgr_reward,
    "vgr_reward": vgr_reward,
    "vgr_hard_negative": vgr_hard_negative_reward,
    "vgr_hard_negative_reward": vgr_hard_negative_reward,
    "mdi": mdi_reward,
    "mdi_reward": mdi_reward,
}
FACTORIES: dict[str, Callable[..., Any]] = {
    "length": get_soft_overlong_punishment,
    "soft_overlong": get_soft_overlong_punishment,
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
}
_HARD: dict[Any, Any] = {
    vgr_reward: vgr_hard_negative_reward,
    "vgr": "vgr_hard_negative",
    "vgr_reward": "vgr_hard_negative_reward",
}
_KEY = re.compile(r"(.*?)(?:\[(\w+)\])?", re.DOTALL)
_FORMS = "my_package.rewards.my_reward or my_rewards.py:my_reward"


def load_rewards(
    specs: Iterable[Any],
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
) -> list[Callable[..., Any]]:
    """Return the reward functions that `specs` name, in their order; see `load_reward`."""
    rewards = [
        load_reward(spec, max_completion_length=max_completion_length, soft_punish_cache=soft_punish_cache, files=files)
        for spec in ([specs] if isinstance(specs, str) else specs)
    ]
    share_scores(rewards)
    return rewards


def load_reward(
    spec: Any,
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
) -> Callable[..., Any]:
    """Return the reward function that `spec` names.

    Args:
        spec: a name (`accuracy`, `format`, `length`, or one that an installed package registers as entry point of the
            group `vgr_trl.rewards`), a dotted path `my_package.rewards.my_reward`, or a file
            `my_rewards.py:my_reward`, relative to the working directory or absolute. A function is returned as it is.
            Of a function in the form of EasyR1 it is the score `overall`, with `[accuracy]` behind it another one.
        max_completion_length: tokens, for `length`.
        soft_punish_cache: tokens, for `length`; None: a fifth of `max_completion_length`, the ratio of DAPO
            (https://huggingface.co/papers/2503.14476).
        files: how functions in the form of EasyR1 are called; None: as their files say.

    Raises:
        RewardError: nothing has this name, two packages have it, it cannot be imported, or it is not a function.
    """
    if not isinstance(spec, str):
        return _checked(spec, repr(spec), max_completion_length, soft_punish_cache)
    name, key = _KEY.fullmatch(spec.strip()).groups()  # type: ignore[union-attr]  # the first part takes anything
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        found = _attribute(import_file(path), attribute, path)
    elif colon:
        found = _attribute(import_module(path), attribute, path)
    elif name in FACTORIES or name in REWARDS or "." not in name:
        found = _named(name)
    elif name.endswith(".py"):
        raise RewardError(f"The reward {name!r} is a file: add which function of it, as in {name}:my_reward.")
    else:
        module, _, attribute = name.rpartition(".")
        found = _attribute(import_module(module), attribute, module)
    if is_scored(found):
        return scored_reward(found, key or OVERALL, files or FileOptions())
    if key is not None:
        raise RewardError(f"The reward {spec!r} names the score {key!r}, but {name} returns one number: drop [{key}].")
    return _checked(found, repr(name), max_completion_length, soft_punish_cache)


def hardened(rewards: Iterable[Any]) -> list[Any]:
    """Return reward functions, or names of them, with the hard negatives of `vgr` in the place of `vgr`.

    Raises:
        RewardError: there is neither among them.
    """
    rewards = list(rewards)
    changed = [_HARD.get(reward, reward) if isinstance(reward, str | FunctionType) else reward for reward in rewards]
    if not any(reward in _HARD.values() for reward in changed if isinstance(reward, str | FunctionType)):
        shown = " ".join(reward if isinstance(reward, str) else _shown(reward) for reward in rewards)
        raise RewardError(
            f"vgr_hard_negative is on, but the reward functions are {shown or 'none'}: name vgr there, or switch it "
            "off."
        )
    return changed


def _shown(reward: Any) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def known_names() -> list[str]:
    """Return the names that `load_reward` accepts, without dotted paths and files."""
    return sorted({*REWARDS, *FACTORIES, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _named(name: str) -> Any:
    registered = {entry.value: entry for entry in entry_points(group=ENTRY_POINTS, name=name)}
    own = REWARDS.get(name) or FACTORIES.get(name)
    others = [entry for entry in registered.values() if own is None or not entry.value.startswith("vgr_trl.rewards.")]
    if len(others) + (own is not None) > 1:
        owners = ["vgr_trl"] * (own is not None) + [f"{_package(entry)} ({entry.value})" for entry in others]
        raise RewardError(
            f"The reward {name!r} is registered more than once, by {' and by '.join(owners)}: give"
            f" the one you mean as a dotted path, such as {others[0].value.replace(':', '.')}."
        )
    if own is not None:
        return own
    if not others:
        raise RewardError(
            f"There is no reward {name!r}: give one of {', '.join(known_names())}, or a dotted path or file "
            f"such as {_FORMS}."
        )
    try:
        return others[0].load()
    except Exception as error:
        raise RewardError(
            f"The reward {name!r} of {_package(others[0])} cannot be imported ({type(error).__name__}: {error}): "
            "repair or remove that package."
        ) from error


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _attribute(module: Any, name: str, where: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError as error:
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise RewardError(
            f"{where} has no reward {name!r}: give one of its functions ({', '.join(functions) or 'it has none'})."
        ) from error


def _checked(reward: Any, shown: str, max_completion_length: int | None, soft_punish_cache: int | None) -> Any:
    if reward is get_soft_overlong_punishment:
        if max_completion_length is None:
            raise RewardError(
                f"The reward {shown} needs max_completion_length, which is None: give it as a number of tokens."
            )
        cache = max_completion_length // 5 if soft_punish_cache is None else soft_punish_cache
        return get_soft_overlong_punishment(max_completion_length, cache)
    if not callable(reward) or inspect.isclass(reward):
        raise RewardError(
            f"The reward {shown} is {'a class' if inspect.isclass(reward) else f'of type {type(reward).__name__}'}: "
            "give a function that takes completions and returns one number or None for each."
        )
    return reward
