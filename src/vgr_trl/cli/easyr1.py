"""`--config theirs.yaml` and `a.b=c` of EasyR1, MTRL and verl: converted, printed as a table, passed on as flags."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.cli.arguments import DataArguments, EvaluationArguments
from vgr_trl.config_converters import SECTIONS, Conversion, convert, flat, is_convertible
from vgr_trl.utils import ConfigError, StrictLoader

IGNORE = "--ignore_unknown_keys"
OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.\w+)+)=(.*)", re.DOTALL)
EVALUATED = {"num_generations_eval": "num_samples", "eval_temperature": "temperature"}


class _Loader(StrictLoader):
    """YAML in which 5e-7 is a number, as it is for OmegaConf."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def convert_flags(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command and its arguments, a configuration of another trainer among them converted into flags.

    The table is printed by the first process. `val_only` makes `evaluate` of `train`.

    Raises:
        ConfigError: a key is unknown or has no meaning here, and `--ignore_unknown_keys` is not given.
    """
    arguments = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    overrides = [match for word in arguments if (match := OVERRIDE.fullmatch(word))]
    kept = [word for word in arguments if not OVERRIDE.fullmatch(word)]
    content: Any = {}
    if "--config" in kept[:-1]:
        place = kept.index("--config")
        content = _read(Path(kept[place + 1]))
        if not is_convertible(content):
            if overrides and content is not None:
                raise ConfigError(
                    f"{overrides[0][0]} goes with a configuration of EasyR1, which {kept[place + 1]} is not."
                )
            return command, arguments
        del kept[place : place + 2]
    elif not overrides:
        return command, arguments
    if any(word.partition("=")[0] == "--recipe" for word in kept):
        raise ConfigError("--recipe is given with a configuration of EasyR1, which states all options: drop one.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = convert(flat(content) | {match[1]: _value(match[2]) for match in overrides}, processes)
    if os.environ.get("RANK", "0") == "0":
        _print_table(found, processes)
    _stop(found, kept)
    for name in ("WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.setdefault(name, str(found.options["project"]))
    if command == "evaluate" or found.values["trainer.val_only"]:
        return "evaluate", [*_as_flags(_to_evaluate(found)), *(word for word in kept if word != IGNORE)]
    return command, [*_as_flags(found.options), *kept]


def _read(file: Path) -> Any:
    """The content of a YAML file; None where it cannot be read, which is reported where files of ours are read."""
    try:
        return yaml.load(file.read_text(encoding="utf-8-sig"), _Loader)  # a safe loader
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None


def _value(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.YAMLError:
        return text


def _print_table(found: Conversion, processes: int) -> None:
    rows = [("key", "ours", "value")]
    rows += [(line.key + "*" * (not line.is_stated), *line[1:3]) for line in found.lines]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    print("A configuration of EasyR1 in options of this library (*: theirs by default):")
    print("\n".join(f"  {key:<{first}}  {ours:<{second}}  {value}" for key, ours, value in rows), flush=True)
    theirs = found.values["trainer.nnodes"] * found.values["trainer.n_gpus_per_node"]
    if theirs != processes:
        print(
            f"The configuration asks for {theirs} processes, this run has {processes}: batches and updates stay the "
            f"same. For as many, start with accelerate launch --num_processes {theirs}.",
            flush=True,
        )


def _stop(found: Conversion, kept: Sequence[str]) -> None:
    own_rewards = any(word.partition("=")[0] == "--reward_funcs" for word in kept)
    unknown = {
        key: why
        for key, why in found.stopped.items()
        if not (own_rewards and key.startswith("worker.reward.reward_f")) and IGNORE not in kept
    }
    for reasons, cure in (
        (found.refused, "Give other values: without these something else would be trained."),
        (unknown, f"Change or remove these keys, or run without them by {IGNORE}."),
    ):
        if reasons:
            sentences = [
                f"{key} {why}" if why.endswith((".", "?")) else f"{key} {why}." for key, why in reasons.items()
            ]
            raise ConfigError(" ".join([*sentences, cure]))


def _to_evaluate(found: Conversion) -> dict[str, Any]:
    options = {**found.options, **{new: found.options[old] for old, new in EVALUATED.items() if old in found.options}}
    known = {option.name for group in (DataArguments, EvaluationArguments) for option in fields(group)}
    options = {name: value for name, value in options.items() if name in known}
    if options.get("temperature") == 0:
        options |= {"num_samples": 0, "temperature": 1.0}
    if (checkpoint := found.values["trainer.load_checkpoint_path"]) is not None:
        options["model_name_or_path"] = checkpoint
    return options


def _as_flags(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, dict | bool) else str(each) for each in values]
        words += [f"--{name}", *texts]
    return words
