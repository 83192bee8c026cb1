"""Values of a YAML file as their options take them: argparse converts and checks texts only."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from vgr_trl.errors import ConfigError

_NAMES = {float: "a number", int: "an integer", bool: "true or false", str: "a text", list: "a list", dict: "a mapping"}


def as_options_take_them(values: Mapping[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a file by option; one that stands alone where a list is asked for becomes a list.

    Args:
        groups: the dataclasses that the options belong to.

    Raises:
        ConfigError: a value is of a kind that its option does not take; texts are left to the parser.
    """
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    defaults = {option.name: _shown_default(option) for group in groups for option in fields(group)}
    return {
        name: _taken(name, value, _members(hints[name]), defaults[name]) if name in defaults else value
        for name, value in values.items()
    }


def _taken(name: str, value: Any, members: tuple[Any, ...], default: str) -> Any:
    kinds = {get_origin(member) or member for member in members}
    wanted = " or ".join(text for kind, text in _NAMES.items() if kind in kinds)
    if not kinds <= {*_NAMES, NoneType} or (value is None and NoneType in kinds):
        return value
    if value is None:
        raise ConfigError(f"{name} has no value in the file: give {wanted}, or leave its line out{default}.")
    if list in kinds and str not in kinds and not isinstance(value, list | dict):
        value = [value]
    if not _is_one_of(value, kinds):
        raise ConfigError(f"{name} is {value!r} in the file: give {wanted}.")
    inner = {kind for member in members if get_origin(member) is list for kind in get_args(member)} & {*_NAMES}
    for each in value if isinstance(value, list) and len(inner) == 1 else ():
        if not _is_one_of(each, inner) or (isinstance(each, str) and str not in inner):
            raise ConfigError(f"{name} has {each!r} in the file: give a list, each {_NAMES[next(iter(inner))]}.")
    return value


def _is_one_of(value: Any, kinds: set[Any]) -> bool:
    """Whether an option of these kinds takes a value; a text or a list for a text is judged later."""
    if isinstance(value, dict):
        return dict in kinds
    if isinstance(value, list):
        return list in kinds or str in kinds
    if isinstance(value, bool):
        return bool in kinds or str in kinds
    if isinstance(value, int):
        return bool({int, float, str} & kinds)
    return not isinstance(value, float) or bool({float, str} & kinds)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _shown_default(option: Any) -> str:
    return "" if option.default is MISSING else f" for its default, {option.default}"
