"""Checks of option values, each an error of one sentence."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from vgr_trl.errors import ConfigError


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_number(name: str, value: Any, low: float, high: float, meaning: str) -> None:
    """Raise `ConfigError` unless `value` is a number in [low, high], described by `meaning`."""
    if not (is_number(value) and low <= value <= high):
        raise ConfigError(f"{name} is {value!r}: give a number {meaning}.")


def check_integer(name: str, value: Any, low: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ConfigError(f"{name} is {value!r}: give an integer of at least {low}.")


def check_fraction(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number in (0, 1]."""
    if not (is_number(value) and 0 < value <= 1):
        raise ConfigError(f"{name} is {value!r}: give a number in (0, 1].")


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: give {_listed(choices)}.")


def check_switch(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is True or False: a text such as "no" would switch the option on."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give True or False.")


def check_interval(name: str, value: Any, low: float, within: float | None, meaning: str) -> None:
    """Raise `ConfigError` unless `value` is a pair low <= a <= within <= b; `within` None: a < b."""
    pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and all(map(is_number, value))
    inside = pair and low <= value[0]
    if not (inside and (value[0] < value[1] if within is None else value[0] <= within <= value[1])):
        raise ConfigError(f"{name} is {value!r}: give two numbers {meaning}.")


def _listed(choices: Sequence[str | None]) -> str:
    *first, last = ["None" if choice is None else choice for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last
