"""Convert a configuration file and its overrides to options; check the options, and print the conversion as a table."""

import os
import re
from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vgr_trl.config_converters.key_tables import (
    EASYR1_KEYS,
    MTRL_SECTIONS,
    VERL_KEYS,
    VERL_RENAMED_KEYS,
    easyr1_name,
)
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.options import check_value
from vgr_trl.patching import patched_attribute
from vgr_trl.recipes import naming_yaml_errors, parse_yaml, read_options


@dataclass
class Conversion:
    """The options that a configuration converts to, and the keys that cannot be converted.

    Attributes:
        values: value of every EasyR1 key, stated or default.
        processes: number of processes of this run.
        names: EasyR1 key -> its name in the configuration, if that differs.
        stated: EasyR1 keys that the configuration states.
        framework: the trainer whose configuration it is, for messages.
        options: options of this library, by name.
        options_by_key: EasyR1 key -> options computed from it; "": options computed from no key.
        unsupported: keys that are unknown or have no equivalent here -> reason.
        refused: keys that cannot be ignored without changing the training -> reason.
        files: EasyR1 key -> files that must exist.
        checkpoint: checkpoint to resume from or to evaluate.
        notes: sentences printed below the table.
    """

    values: dict[str, Any]
    processes: int
    names: Mapping[str, str]
    stated: Collection[str]
    framework: str = "EasyR1"
    options: dict[str, Any] = field(default_factory=dict)
    options_by_key: dict[str, list[str]] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    checkpoint: str | None = None
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def name(self, key: str) -> str:
        """Return the name of an EasyR1 key in the configuration."""
        return self.names.get(key, key)

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Set an option, and record the keys that it comes from.

        Args:
            option: name of the option.
            value: None leaves the option out.
            keys: EasyR1 keys that the value is computed from.
        """
        if value is not None:
            self.options[option] = value
            for key in keys or ("",):
                self.options_by_key.setdefault(key, []).append(option)

    def mark_unsupported(self, key: str, why: str) -> None:
        """Record that the value of a key has no equivalent here; `--ignore_unknown_keys` skips it."""
        self.unsupported[key] = f"{self.describe(key)}: {why}"

    def mark_refused(self, key: str, why: str) -> None:
        """Record that the value of a key is not supported and cannot be ignored without changing the training."""
        self.refused[key] = f"{self.describe(key)}: {why}"

    def describe(self, key: str) -> str:
        """Return the value of a key as the predicate of a sentence: `is 4 by default`."""
        return f"is {self[key]!r}{'' if key in self.stated else ' by default'}"

    def read_integer(self, key: str, least: int = 1) -> int:
        """Return the value of a key as an integer of at least `least`, or raise `ConfigError`."""
        value = self[key]
        check_value(self.name(key), value, int, ge=least)
        return int(value)

    def read_choice(self, key: str, *choices: Any) -> Any:
        """Return the value of a key if it is a choice; else refuse the key and return the first choice."""
        if self[key] in choices:
            return self[key]
        self.mark_refused(key, f"supported values are {', '.join(map(str, choices))}")
        return choices[0]

    def table_rows(self) -> list[tuple[str, str, str]]:
        """Return rows of key (* if not stated), option and value, or the reason why there is no option."""
        reasons, rows = {**self.unsupported, **self.refused}, list[tuple[str, str, str]]()
        own = {key: row for key, row in VERL_KEYS.items() if key not in self.names.values()}
        for key, row in (EASYR1_KEYS | own).items():
            name, options = self.name(key), self.options_by_key.get(key, ())
            mark = name if key in self.stated else f"{name}*"
            if key in reasons:
                rows.append((mark, "—", f"stops: {reasons.pop(key).split(': ', 1)[-1]}"))
            elif options and (self.framework != "verl" or key in {*self.stated, *self.names, *own}):
                rows += [(mark, option, str(self.options[option])) for option in options]
            elif key in self.stated:
                rows.append((name, "—", row.why or "same as the default here, or not used in this run"))
        rows += [(self.name(key), "—", f"stops: {why}") for key, why in reasons.items()]
        return rows + [("(none)*", name, str(self.options[name])) for name in self.options_by_key.get("", ())]

    def format_table(self, verbose: bool = False) -> str:
        """Return the table of stated keys as text, and a note if the file asks for another number of processes.

        Args:
            verbose: also list the other trainer's defaults.
        """
        all_rows = self.table_rows()
        rows = [("key", "option", "value"), *(row for row in all_rows if verbose or not row[0].endswith("*"))]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        text = [f"Options of this library for the configuration of {self.framework} (*: its default):"]
        text += [f"  {key:<{first}}  {option:<{second}}  {value}" for key, option, value in rows]
        if left := len(all_rows) + 1 - len(rows):
            text.append(f"  and {left} defaults of {self.framework}, which --verbose lists.")
        theirs = self["trainer.nnodes"] * self["trainer.n_gpus_per_node"]
        if theirs != self.processes:
            asks = f"The configuration asks for {theirs} processes, this run has {self.processes}; batches stay equal"
            text.append(f"{asks}. To use {theirs}, start with accelerate launch --num_processes {theirs}.")
        return "\n".join([*text, *self.notes])

    def check(self, flags: Collection[str], is_evaluation: bool = False, problem: str = "") -> None:
        """Raise `ConfigError` for all keys that are unsupported or refused, and all files that do not exist.

        Args:
            flags: flags beside the configuration: `--ignore_unknown_keys` skips unsupported keys, and a flag of
                rewards replaces those of the configuration.
            is_evaluation: check refused keys of data and rewards only, since nothing is trained.
            problem: a sentence to add.
        """
        rewards = {"worker.reward.reward_function", "worker.reward.reward_type"}
        replaced = rewards if {"--reward_funcs", "--reward_model_name_or_path"} & set(flags) else set[str]()
        checked = "data.", "worker.reward."
        refused = {k: why for k, why in self.refused.items() if not is_evaluation or k.startswith(checked)}
        unknown = {} if "--ignore_unknown_keys" in flags else self.unsupported
        unknown = {key: why for key, why in unknown.items() if key not in replaced}
        missing = [(key, file) for key in self.files.keys() - replaced for file in self.files[key]
                   if not set("*?[") & set(file) and not Path(file).exists()]  # fmt: skip
        sentences = [f"{self.name(key)} is {file}, which does not exist." for key, file in sorted(missing)]
        for cure, keys in (
            ("Give other values; ignoring these would change the training.", refused),
            ("Change or remove these keys, or pass --ignore_unknown_keys to ignore them.", unknown),
        ):
            sentences += [f"{self.name(k)} {why}{'' if why.endswith(('.', '?')) else '.'}" for k, why in keys.items()]
            sentences += [cure] * bool(keys)
        if sentences or problem:
            raise ConfigError(" ".join([*sentences, problem]).strip())

    def evaluation_options(self) -> dict[str, Any]:
        """Return the options with the names that `vgr-trl evaluate` uses added.

        Raises:
            ConfigError: the checkpoint to evaluate does not exist.
        """
        name, folder = self.name("trainer.load_checkpoint_path"), self["trainer.load_checkpoint_path"]
        if folder is not None and (self.checkpoint is None or not Path(self.checkpoint).is_dir()):
            raise ConfigError(f"{name} is {folder}, which has no checkpoint to evaluate: give a folder that has one.")
        options = dict(self.options)
        for option, name in (("num_samples", "num_generations_eval"), ("temperature", "eval_temperature")):
            if name in options:
                options[option] = options[name]
        if options.get("temperature") == 0:
            options |= {"num_samples": 0, "temperature": 1.0}
        if self.checkpoint is not None:
            options["model_name_or_path"] = self.checkpoint
        return options


_SECTIONS = ("data", "algorithm", "worker", "trainer", *MTRL_SECTIONS, "actor_rollout_ref", "critic",
             "custom_reward_function")  # fmt: skip
_OVERRIDE_PATTERN = re.compile(rf"\+{{0,2}}((?:{'|'.join(_SECTIONS)})(?:\.\w+)+)=(.*)", re.DOTALL)
_LAUNCH_VARIABLE = re.compile(r"(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_((JOB|ARRAY)_\w+|PROCID|N\w+)")
# Keys whose values are mappings, not sections.
_MAPPING_KEYS = [key for key, row in EASYR1_KEYS.items() if isinstance(row.default, dict)]
_MAPPING_KEYS += [key for key, (_, default) in VERL_RENAMED_KEYS.items() if isinstance(default, dict)]


def read_configuration(argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Read `--config FILE` and overrides `a.b=c`; return values by dotted key, and the remaining command-line words.

    Returns None and all words if there is no configuration of these trainers.

    Raises:
        ConfigError: the file or an override cannot be read, or an interpolation `${…}` cannot be resolved.
    """
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file, kept = finder.parse_known_args(argv)
    matches = {word: match for word in kept if (match := _OVERRIDE_PATTERN.fullmatch(word))}
    content = {} if file.config is None else read_options(file.config, f"The file {file.config}")
    with naming_yaml_errors("An override"):
        overrides = {match[1]: parse_yaml(match[2]) for match in matches.values()}
    has_section = any(isinstance(content.get(name), dict) for name in _SECTIONS)
    if not has_section and not (file.config is None and overrides):
        return None, list(argv)
    if "${" in f"{content}{overrides}":
        content, overrides = _resolve_interpolations(content, overrides), {}
    return flatten(content) | overrides, [word for word in kept if word not in matches]


def _resolve_interpolations(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Apply overrides to a configuration and resolve its interpolations `${…}`."""
    try:
        from omegaconf import OmegaConf  # optional: few files use interpolation, and TRL does not require it

        configuration = OmegaConf.create(dict(content))
        for key, value in overrides.items():
            OmegaConf.update(configuration, key, value, merge=False)
        with patched_attribute(os, "environ", _LaunchVariables(os.environ)):
            return OmegaConf.to_container(configuration, resolve=True)
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
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, Mapping) and easyr1_name(key) not in _MAPPING_KEYS and key not in _MAPPING_KEYS
        flat |= flatten(value, f"{key}.") if is_section else {key: value}
    return flat
