"""Read configurations of EasyR1, MTRL, VPPO and verl: a file, and overrides on the command line."""

import os
import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.config_converters.key_tables import EASYR1_KEYS
from vgr_trl.config_converters.mtrl import MTRL_SECTIONS, easyr1_name
from vgr_trl.config_converters.verl import VERL_RENAMED_KEYS
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.strict_yaml import parse_yaml

_SECTIONS = ("data", "algorithm", "worker", "trainer", *MTRL_SECTIONS, "actor_rollout_ref", "critic",
             "custom_reward_function")  # fmt: skip
_OVERRIDE_PATTERN = re.compile(rf"\+{{0,2}}((?:{'|'.join(_SECTIONS)})(?:\.\w+)+)=(.*)", re.DOTALL)
_LAUNCH_VARIABLE = re.compile(r"(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_((JOB|ARRAY)_\w+|PROCID|N\w+)")
# Keys whose values are mappings, not sections.
_MAPPING_KEYS = [key for key, known in EASYR1_KEYS.items() if isinstance(known.default, dict)]
_MAPPING_KEYS += [key for key, (_, default) in VERL_RENAMED_KEYS.items() if isinstance(default, dict)]


def read_configuration(argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Read `--config FILE` and overrides `a.b=c`; return values by dotted key, and the remaining command-line words.

    Returns None and all words if there is no configuration of these trainers, or the file cannot be read.

    Raises:
        ConfigError: an interpolation `${…}` cannot be resolved.
    """
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file, kept = finder.parse_known_args(argv)
    matches = {word: match for word in kept if (match := _OVERRIDE_PATTERN.fullmatch(word))}
    try:
        content = {} if file.config is None else parse_yaml(file.config.read_text(encoding="utf-8-sig"))
        overrides = {match[1]: parse_yaml(match[2]) for match in matches.values()}
    except (OSError, ValueError, yaml.YAMLError):
        return None, list(argv)
    has_section = isinstance(content, dict) and any(isinstance(content.get(name), dict) for name in _SECTIONS)
    if not has_section and not (file.config is None and overrides):
        return None, list(argv)
    if "${" in f"{content}{overrides}":
        content, overrides = _resolve_interpolations(content, overrides), {}
    return flatten(content) | overrides, [word for word in kept if word not in matches]


def _resolve_interpolations(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Apply overrides to a configuration and resolve its interpolations `${…}`."""
    try:
        from omegaconf import OmegaConf  # optional: few files use interpolation, and TRL does not require it

        found = OmegaConf.create(dict(content))
        for key, value in overrides.items():
            OmegaConf.update(found, key, value, merge=False)
        with patched_attribute(os, "environ", _LaunchVariables(os.environ)):
            return OmegaConf.to_container(found, resolve=True)
    except Exception as error:
        raise ConfigError(f"The ${{…}} cannot be resolved (by omegaconf): {error_text(error)}.") from error


class _LaunchVariables(dict[str, str]):
    """The environment for `oc.env`, whose values go into names, logs and trackers: of launchers' variables alone."""

    def __getitem__(self, name: str) -> str:
        if not _LAUNCH_VARIABLE.fullmatch(name):
            raise ValueError(f"oc.env:{name} is none of the variables that launchers set, as RANK: write its value")
        return super().__getitem__(name)


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, Mapping) and easyr1_name(key) not in _MAPPING_KEYS and key not in _MAPPING_KEYS
        found |= flatten(value, f"{key}.") if is_section else {key: value}
    return found
