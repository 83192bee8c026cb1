"""Read the tables of another framework's keys, `<framework>.yaml`: defaults there, and renamed, ignored or fixed keys.

Configurations of every framework are converted by EasyR1's keys, `EASYR1_KEYS`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vgr_trl.errors import ConfigError


class Key(NamedTuple):
    """A key of another trainer; `convert_*` functions compute options from a key with neither `option` nor `why`.

    Attributes:
        default: value if the configuration does not state the key.
        option: option that takes the value unchanged.
        condition: entry of `CONDITIONS` under which it does; None: always.
        why: reason why the key needs no option.
        accepted: values that need no option; others stop the run. None: all.
    """

    default: Any
    option: str | None = None
    condition: str | None = None
    why: str = ""
    accepted: list[Any] | None = None


def load_tables(name: str) -> dict[str, Any]:
    """Return the tables of a framework."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def build_keys(tables: Mapping[str, Any]) -> dict[str, Key]:
    """Build the keys of the tables `renamed`, `computed`, `ignored` and `fixed`, sorted by name."""
    found = {key: Key(*row) for key, row in tables.get("renamed", {}).items()}
    found |= {key: Key(default) for key, default in tables["computed"].items()}
    found |= {key: Key(value, why=why) for why, keys in tables["ignored"].items() for key, value in keys.items()}
    found |= {key: Key(values[0], why=why, accepted=values) for key, (why, *values) in tables["fixed"].items()}
    return dict(sorted(found.items()))


EASYR1_KEYS = build_keys(load_tables("easyr1"))


def check_type(name: str, value: Any, known: Key) -> None:
    """Check that a switch is a bool and a number a number: the text "flase" would switch a key on.

    Args:
        name: of the key in the configuration.
        value: None passes.
        known: the key of EasyR1, whose default has the type to check.

    Raises:
        ConfigError: naming the key and the expected type.
    """
    if value is None or known.why:
        return
    kind = type(known.default)
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give true or false.")
    if kind in (int, float) and not re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", str(value).lower()):
        raise ConfigError(f"{name} is {value!r}: give a number.")
