"""How an option is declared, and the checks of its value."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import field
from functools import partial
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from vgr_trl.utils import ConfigError

# ---------------------------------------------------------------------------------------------------------------------
# One option: its default, and the text that describes it wherever it is shown.


def option(default: Any, text: str, **parsing: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        default: where nothing is given; of a list, every run gets a copy.
        text: its one description.
        parsing: arguments of argparse that its type does not say.
    """
    metadata = {"help": text, **parsing}
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# ---------------------------------------------------------------------------------------------------------------------
# Checks of option values, each an error of one sentence.


Check = Callable[[str, Any], None]  # of an option's name and value; stands in `Annotated` behind the option's type
SMALLEST, LARGEST = 1e-30, 1e30


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


def check_list(name: str, value: Any) -> None:
    """Raise `ConfigError` for a text, whose letters would be taken for a list of names."""
    if isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}: give a list, [{value!r}].")


def check_interval(name: str, value: Any, low: float, within: float | None, meaning: str) -> None:
    """Raise `ConfigError` unless `value` is a pair low <= a <= within <= b; `within` None: a < b."""
    pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and all(map(is_number, value))
    inside = pair and low <= value[0]
    if not (inside and (value[0] < value[1] if within is None else value[0] <= within <= value[1])):
        raise ConfigError(f"{name} is {value!r}: give two numbers {meaning}.")


def in_range(low: float, high: float, meaning: str) -> Check:
    """Return the check for a number in [low, high], described by `meaning`."""
    return partial(check_number, low=low, high=high, meaning=meaning)


def at_least(low: int) -> Check:
    """Return the check for an integer."""
    return partial(check_integer, low=low)


def one_of(*choices: str | None) -> Check:
    """Return the check for one of some texts."""
    return partial(check_choice, choices=choices)


def each(check: Check) -> Check:
    """Return the check for a list of what passes another."""

    def check_all(name: str, values: Sequence[Any]) -> None:
        for value in values:
            check(name, value)

    return check_all


Fraction = Annotated[float, check_fraction]
Switch = Annotated[bool, check_switch]
Natural = Annotated[int, at_least(0)]
PositiveInt = Annotated[int, at_least(1)]
Share = Annotated[float, in_range(0, 1, "in [0, 1]")]
Weight = Annotated[float, in_range(0, LARGEST, "of at least 0")]
Positive = Annotated[float, in_range(SMALLEST, LARGEST, "above 0")]


def check_values(options: Any) -> None:
    """Raise `ConfigError` for the first field of a dataclass that a check behind its type refuses; None is none."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        checks = getattr(hint, "__metadata__", ())
        if checks and not (getattr(options, name) is None and NoneType in get_args(hint.__origin__)):
            for check in checks:
                check(name, getattr(options, name))


def _listed(choices: Sequence[str | None]) -> str:
    *first, last = ["None" if choice is None else choice for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last
