"""Read the tables of other trainers' keys and flags, and rename the keys of MTRL, VPPO and verl to EasyR1's.

Configurations of every framework are converted by EasyR1's keys, `EASYR1_KEYS`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vgr_trl.errors import ConfigError, did_you_mean


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
    keys = {key: Key(*row) for key, row in tables.get("renamed", {}).items()}
    keys |= {key: Key(default) for key, default in tables["computed"].items()}
    keys |= {key: Key(value, why=why) for why, table in tables["ignored"].items() for key, value in table.items()}
    keys |= {key: Key(values[0], why=why, accepted=values) for key, (why, *values) in tables["fixed"].items()}
    return dict(sorted(keys.items()))


def load_flags() -> dict[str, dict[str, str]]:
    """Return framework -> its flags -> the flag here, or why there is none."""
    return {name: {flag: here for row, here in table.items() for flag in row.split(", ")}
            for name, table in load_tables("flags").items()}  # fmt: skip


def explain_unknown(unknown: Sequence[str], stated: Sequence[str], options: Collection[str], prefix: str = "") -> str:
    """Suggest a replacement for each unknown option, in sentences or lines.

    Args:
        unknown: their names.
        stated: all names that the user gave; some have another meaning in the framework of the unknown ones.
        options: names of the options here.
        prefix: written before names, as `--`.
    """
    flags = load_flags()
    framework = max(flags, key=lambda name: len(flags[name].keys() & set(unknown)))
    theirs = flags[framework]
    if not theirs.keys() & set(unknown):
        ours = [f"{prefix}{name}" for name in options]
        return "".join(dict.fromkeys(did_you_mean(f"{prefix}{name}", ours) for name in unknown))
    lines = [f"  {prefix}{name}: {theirs[name]}" for name in dict.fromkeys(stated) if name in theirs]
    lines += [f"  {prefix}{name}: unknown" for name in unknown if name not in theirs]
    return "\n".join([f" {framework}'s flags, and ours:", *lines, "docs/migration.md shows all."])


EASYR1_KEYS = build_keys(load_tables("easyr1"))


def check_type(name: str, value: Any, key: Key) -> None:
    """Check that a switch is a bool and a number a number: the text "flase" would switch a key on.

    Args:
        name: name of the key in the configuration.
        value: None passes.
        key: the key of EasyR1, whose default has the type to check.

    Raises:
        ConfigError: naming the key and the expected type.
    """
    if value is None or key.why:
        return
    kind = type(key.default)
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give true or false.")
    if kind in (int, float) and not re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", str(value).lower()):
        raise ConfigError(f"{name} is {value!r}: give a number.")


_MTRL = load_tables("mtrl")
MTRL_SECTIONS: dict[str, str] = _MTRL["sections"]  # section of MTRL -> EasyR1's
MTRL_NAMES: dict[str, str] = _MTRL["names"] | _MTRL["other_names"]  # key of MTRL, VPPO or a port -> EasyR1's


def easyr1_name(key: str) -> str:
    """Return EasyR1's name for a key of MTRL or VPPO; critic and reference use the actor's names."""
    section, dot, rest = key.partition(".")
    key = f"{MTRL_SECTIONS.get(section, section)}{dot}{rest}"
    if role := re.match(r"worker\.(critic|ref)\.", key):
        name = f"worker.actor.{key[role.end() :]}"
        return MTRL_NAMES.get(name, name).replace("worker.actor.", role[0])
    return MTRL_NAMES.get(key, key)


def rename_mtrl_keys(configuration: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by EasyR1's keys, and EasyR1 key -> name in the configuration, or in its section.

    Raises:
        ConfigError: two names of one key have different values.
    """
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in configuration.items():
        key = easyr1_name(name)
        if key in stated and stated[key] != value:
            raise ConfigError(f"{names[key]} is {stated[key]!r}, but its other name {name} is {value!r}: give one.")
        stated[key], names[key] = value, name
    is_mtrl = uses_mtrl_sections(configuration)
    theirs = {key: name for name, key in _MTRL["names"].items()} if is_mtrl else {}
    used = {section: name for name, section in MTRL_SECTIONS.items()} if is_mtrl else {}
    for key in EASYR1_KEYS:
        section, dot, rest = theirs.get(key, key).partition(".")
        names.setdefault(key, f"{used.get(section, section)}{dot}{rest}")
    return stated, names


def uses_mtrl_sections(configuration: Mapping[str, Any]) -> bool:
    """Whether a configuration has a section with MTRL's name."""
    return any(name.partition(".")[0] in MTRL_SECTIONS for name in configuration)


_VERL = load_tables("verl")
VERL_KEYS = build_keys(_VERL)  # keys that EasyR1 lacks
VERL_RENAMED_KEYS: dict[str, list[Any]] = _VERL["names"]  # key of verl -> EasyR1's, and verl's default
VERL_DEFAULTS: dict[str, Any] = _VERL["defaults"]  # keys that both have, with verl's default
_MODES = {"token-mean": "token", "seq-mean-token-mean": "seq", "vanilla": "default"}


def rename_verl_keys(configuration: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by EasyR1's keys, and EasyR1 key -> its name in verl; keys without one keep EasyR1's."""
    values = VERL_DEFAULTS | {key: value for key, value in configuration.items() if key not in VERL_RENAMED_KEYS}
    values |= {key: configuration.get(name, default) for name, (key, default) in VERL_RENAMED_KEYS.items()}
    names = {key: key for key in VERL_DEFAULTS} | {key: name for name, (key, _) in VERL_RENAMED_KEYS.items()}
    names["worker.reward.reward_function"] = "custom_reward_function.path"
    names["algorithm.disable_kl"] = "algorithm.use_kl_in_reward"
    values_of_verl = {key: configuration.get(key, row.default) for key, row in VERL_KEYS.items()}
    actor = "actor_rollout_ref.actor"
    in_loss = bool(values["algorithm.use_kl_loss"])
    values["algorithm.disable_kl"] = not (in_loss or values_of_verl["algorithm.use_kl_in_reward"])
    pairs = {"worker.actor.loss_avg_mode": f"{actor}.loss_agg_mode",
             "worker.actor.loss_type": f"{actor}.policy_loss.loss_mode"}  # fmt: skip
    if in_loss:
        pairs |= {"algorithm.kl_coef": f"{actor}.kl_loss_coef", "algorithm.kl_penalty": f"{actor}.kl_loss_type"}
    for key, name in pairs.items():
        values[key], names[key] = _MODES.get(values_of_verl[name], values_of_verl[name]), name
    return values, names
