"""Rewards by name: those of this library and of installed packages, dotted paths, and files."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

from vgr_trl import registries
from vgr_trl.errors import RewardError
from vgr_trl.rewards.accuracy import accuracy_reward, blind_accuracy_reward
from vgr_trl.rewards.attention import mdi_reward, region_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.format import tag_count_reward, think_format_reward
from vgr_trl.rewards.length import get_soft_overlong_punishment
from vgr_trl.rewards.scored_files import OVERALL, FileOptions, is_scored, scored_reward, share_scores

for _names, _reward in (
    (("accuracy", "accuracy_reward"), accuracy_reward),
    (("format", "think_format_reward"), think_format_reward),
    (("tag_count", "tag_count_reward"), tag_count_reward),
    (("vgr", "vgr_reward"), vgr_reward),
    (("vgr_hard_negative", "vgr_hard_negative_reward"), vgr_hard_negative_reward),
    (("mdi", "mdi_reward"), mdi_reward),
    (("region", "region_reward"), region_reward),
    (("blind_accuracy", "blind_accuracy_reward"), blind_accuracy_reward),
    (("length", "soft_overlong", "get_soft_overlong_punishment"), get_soft_overlong_punishment),
):
    registries.rewards.register(*_names)(_reward)
_HARD: dict[Any, Any] = {
    vgr_reward: vgr_hard_negative_reward,
    "vgr": "vgr_hard_negative",
    "vgr_reward": "vgr_hard_negative_reward",
}
_KEY = re.compile(r"(.*?)(?:\[(\w+)\])?", re.DOTALL)


def is_reward_name(spec: Any) -> bool:
    """Whether a text names a reward, not a reward model: a known name, a file's or a dotted path, and no folder."""
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
    """Return the reward functions that `specs` name, in their order; see `load_reward`.

    Args:
        options: of all plug-ins of a run, from which each reward takes its own.

    Raises:
        RewardError: one cannot be loaded, or is named twice, whose metrics would be one.
    """
    specs = [specs] if isinstance(specs, str) else list(specs)
    rewards = [
        _loaded(spec, max_completion_length, soft_punish_cache, files or FileOptions(), options or {}) for spec in specs
    ]
    for place, reward in enumerate(rewards):
        if reward in rewards[:place] or specs[place] in specs[:place]:
            raise RewardError(f"The reward {specs[place]} is named twice: name it once, and give it a larger weight.")
    share_scores(rewards)
    return rewards


def load_reward(
    spec: Any,
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the reward function that `spec` names.

    Args:
        spec: a name (`accuracy`, `format`, `length`, or one that an installed package registers as entry point of the
            group `vgr_trl.rewards`), a dotted path `my_package.rewards.my_reward`, or a file
            `my_rewards.py:my_reward`, relative to the working directory or absolute. A function is returned as it is,
            unless `options` are given. Of a function in the form of EasyR1 it is the score `overall`, with `[accuracy]`
            behind it another one.
        max_completion_length: tokens, for `length`.
        soft_punish_cache: tokens, for `length`; None: a fifth of `max_completion_length`, the ratio of DAPO
            (https://huggingface.co/papers/2503.14476).
        files: how functions in the form of EasyR1 are called; None: as their files say.
        options: values of the options that the reward declares, by name; the others have their defaults.

    Raises:
        RewardError: nothing has this name, two packages have it, it cannot be imported, it is not a function, or it
            declares no such option.
    """
    reward = _loaded(spec, max_completion_length, soft_punish_cache, files or FileOptions(), options or {})
    own = registries.option_class(reward, _shown(reward))
    known = [] if own is None else [field.name for field in fields(own)]
    for name in options or ():
        if name not in known:
            accepted = ", ".join(known) or "none, as it declares none"
            raise RewardError(f"The reward {_shown(reward)} has no option {name!r}: give {accepted}.")
    return reward


def _loaded(
    spec: Any,
    max_completion_length: int | None,
    soft_punish_cache: int | None,
    files: FileOptions,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    if not isinstance(spec, str):
        reward = _limited(registries.rewards.load(spec), repr(spec), max_completion_length, soft_punish_cache)
        return _bound(reward, repr(spec), options) if options else reward
    name, key = _KEY.fullmatch(spec.strip()).groups()  # type: ignore[union-attr]  # the first part takes anything
    found = registries.rewards.load(name)
    if is_scored(found):
        return scored_reward(found, key or OVERALL, files)
    if key is not None:
        raise RewardError(f"The reward {spec!r} names the score {key!r}, but {name} returns one number: drop [{key}].")
    return _bound(_limited(found, repr(name), max_completion_length, soft_punish_cache), name, options)


def _bound(reward: Callable[..., Any], shown: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward with its own options as named arguments, if it declares any."""
    options = registries.option_class(reward, shown)
    if options is None:
        return reward
    filled = partial(reward, **vars(registries.option_values(options, given)))

    @wraps(reward)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return filled(*args, **kwargs)

    bound.__signature__ = inspect.signature(filled)  # type: ignore[attr-defined]
    return bound


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


def _limited(
    reward: Callable[..., Any], shown: str, max_completion_length: int | None, soft_punish_cache: int | None
) -> Callable[..., Any]:
    if reward is get_soft_overlong_punishment:
        if max_completion_length is None:
            raise RewardError(
                f"The reward {shown} needs max_completion_length, which is None: give it as a number of tokens."
            )
        cache = max_completion_length // 5 if soft_punish_cache is None else soft_punish_cache
        return get_soft_overlong_punishment(max_completion_length, cache)
    return reward
