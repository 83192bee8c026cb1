"""A configuration of EasyR1, MTRL, VPPO or verl as options of this library, key by key."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from vgr_trl.config.foreign.dialects import THEIRS, VERL, VERL_KEYS, is_verl, of_mtrl, of_verl
from vgr_trl.config.foreign.easyr1 import TABLE, WHOLE
from vgr_trl.config.foreign.keys import Key
from vgr_trl.config.foreign.rules import RULES
from vgr_trl.config.foreign.rules.values import Values
from vgr_trl.errors import ConfigError


class Line(NamedTuple):
    """A line of the table: their key, our option (or why there is none), its value, whether it was stated."""

    key: str
    ours: str
    value: str
    is_stated: bool


@dataclass
class Translation:
    """What a configuration becomes.

    Attributes:
        options: by name.
        lines: of the table, in the order of theirs.
        stopped: keys that are unknown, or that have no meaning here, and why.
        refused: keys without which something else would be trained, and why.
        values: of all keys of EasyR1.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    stopped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def is_theirs(content: Any) -> bool:
    """Whether the content of a YAML file has sections of these trainers."""
    return isinstance(content, dict) and any(isinstance(content.get(name), dict) for name in THEIRS)


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and of_mtrl(key) not in WHOLE and key not in _WHOLE_OF_VERL:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


_WHOLE_OF_VERL = [key for key, (_, default) in VERL.items() if isinstance(default, dict)]


def translate(given: Mapping[str, Any], processes: int = 1) -> Translation:
    """Return what the stated keys, and the defaults of the others, become.

    Args:
        given: values by dotted key, as the file and the overrides state them.
        processes: of this run.

    Raises:
        ConfigError: a value cannot be right in theirs either, or two names of a key have different values.
    """
    taken, names = _in_easyr1(given)
    stated = {key for key in TABLE if names.get(key, key) in given}
    found = Translation(values={key: known.default for key, known in TABLE.items()})
    for key, value in taken.items():
        if key in TABLE:
            _check_kind(names.get(key, key), value, TABLE[key])
            found.values[key] = value
        elif (known := VERL_KEYS.get(key)) is None:
            found.stopped[names.get(key, key)] = f"is unknown.{_nearest(key)}"
        elif known.fits is not None and value not in known.fits:
            found.stopped[key] = f"is {value!r}: {known.why}"
    values, made = Values(found.values, processes, stated), _Made(found.options)
    for rule in RULES:
        try:
            rule(values, made.set)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"A value of the configuration is of another kind than theirs, where {rule.__name__} is read ({error})."
            ) from error
    for key, known in TABLE.items():
        value = found.values[key]
        if known.ours is not None and value is not None:
            made.set(known.ours, value, key)
        elif known.fits is not None and not any(value == fit for fit in known.fits):
            values.stop(key, known.why)
    for told, reasons in ((found.stopped, values.stopped), (found.refused, values.refused)):
        told |= {
            names.get(key, key): f"is {found.values[key]!r}{'' if key in stated else ' by default'}: {why}"
            for key, why in reasons.items()
        }
    found.lines = list(_lines(found, made, stated, names))
    return found


def _check_kind(name: str, value: Any, known: Key) -> None:
    """Refuse what is no switch or no number where theirs has one: a text such as "flase" would switch it on."""
    if value is None or not (known.is_read or known.ours is not None):
        return
    if isinstance(known.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give true or false.")
    if isinstance(known.default, int | float) and not isinstance(known.default, bool) and not _is_number(value):
        raise ConfigError(f"{name} is {value!r}: give a number.")


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


class _Made:
    """The options that are made, and of which keys."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.of: dict[str, list[str]] = {}

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Note an option."""
        self.options[option] = value
        for key in keys or ("",):
            self.of.setdefault(key, []).append(option)


def _in_easyr1(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    if is_verl(dict(given)):
        found, names = of_verl(dict(given))
        return {**found, **{key: value for key, value in given.items() if key in VERL_KEYS}}, names
    stated: dict[str, Any] = {}
    names = {}
    for name, value in given.items():
        key = of_mtrl(name)
        if key in stated and stated[key] != value:
            raise ConfigError(f"{names[key]} is {stated[key]!r} and {name}, which means the same, {value!r}: give one.")
        stated[key], names[key] = value, name
    return stated, names


def _lines(found: Translation, made: _Made, stated: Collection[str], names: Mapping[str, str]) -> Iterable[Line]:
    reasons = {**found.stopped, **found.refused}
    for key, known in TABLE.items():
        shown, is_stated = names.get(key, key), key in stated
        if shown in reasons:
            yield Line(shown, "—", f"stops: {reasons[shown].split(': ', 1)[-1]}", is_stated)
            continue
        for option in made.of.get(key, ()):
            yield Line(shown, option, str(found.options[option]), is_stated)
        if key not in made.of and is_stated:
            yield Line(shown, "—", known.why or "has no part in this configuration", is_stated)
    shown_before = {names.get(key, key) for key in TABLE}
    yield from (Line(key, "—", f"stops: {why}", True) for key, why in found.stopped.items() if key not in shown_before)
    for option in made.of.get("", ()):
        yield Line("(none)", option, str(found.options[option]), False)


def _nearest(key: str) -> str:
    nearest = get_close_matches(key, TABLE, n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]}?" if nearest else ""
