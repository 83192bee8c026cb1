"""Rename keys of MTRL, of VPPO and of EasyR1's ports to EasyR1's."""

import re
from collections.abc import Mapping
from typing import Any

from vgr_trl.config_converters.key_tables import EASYR1_KEYS, load_tables
from vgr_trl.errors import ConfigError

_TABLES = load_tables("mtrl")
MTRL_SECTIONS: dict[str, str] = _TABLES["sections"]  # section of MTRL -> EasyR1's
MTRL_NAMES: dict[str, str] = _TABLES["names"]  # key of MTRL or VPPO -> EasyR1's


def easyr1_name(key: str) -> str:
    """Return EasyR1's name for a key of MTRL or VPPO; critic and reference use the actor's names."""
    section, dot, rest = key.partition(".")
    key = f"{MTRL_SECTIONS.get(section, section)}{dot}{rest}"
    if role := re.match(r"worker\.(critic|ref)\.", key):
        name = f"worker.actor.{key[role.end() :]}"
        return MTRL_NAMES.get(name, name).replace("worker.actor.", role[0])
    return MTRL_NAMES.get(key, key)


def rename_mtrl_keys(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by EasyR1's keys, and EasyR1 key -> name in the configuration, or in its section.

    Raises:
        ConfigError: two names of one key have different values.
    """
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in given.items():
        key = easyr1_name(name)
        if key in stated and stated[key] != value:
            raise ConfigError(f"{names[key]} is {stated[key]!r}, but its other name {name} is {value!r}: give one.")
        stated[key], names[key] = value, name
    sections = {name.partition(".")[0] for name in given}
    used = {section: each for each, section in MTRL_SECTIONS.items() if each in sections}
    for key in EASYR1_KEYS:
        section, dot, rest = key.partition(".")
        names.setdefault(key, f"{used.get(section, section)}{dot}{rest}")
    return stated, names
