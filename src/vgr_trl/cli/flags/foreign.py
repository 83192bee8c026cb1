"""`--config theirs.yaml` and `a.b=c` of EasyR1, MTRL and verl: read, translated, printed as a table, put as flags."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.cli.flags.argv import config_apart, flags_in
from vgr_trl.cli.flags.names import flag_names
from vgr_trl.config.foreign.dialects import THEIRS
from vgr_trl.config.foreign.translate import Line, Translation, flat, is_theirs, translate
from vgr_trl.errors import ConfigError
from vgr_trl.yaml_file import StrictLoader

IGNORE = "--ignore_unknown_keys"
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(THEIRS)})(?:\.\w+)+)=(.*)", re.DOTALL)
_EVALUATED = {"num_generations_eval": "num_samples", "eval_temperature": "temperature"}
_PROJECTS = ("WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME")


class _Loader(StrictLoader):
    """YAML in which 5e-7 is a number, as it is for OmegaConf."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def without_foreign(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command and its arguments, a configuration of another trainer among them translated into flags.

    The table is printed by the first process. `val_only` makes `evaluate` of `train`.

    Raises:
        ConfigError: a key is unknown or has no meaning here, and `--ignore_unknown_keys` is not given.
    """
    arguments = config_apart(argv)
    overrides = [match for argument in arguments if (match := _OVERRIDE.fullmatch(argument))]
    content, file = _content(arguments)
    if not is_theirs(content):
        if overrides and content is not None:
            raise ConfigError(f"{overrides[0][0]} goes with a configuration of EasyR1, which {file} is not.")
        if not overrides:
            return command, arguments
        content = {}
    if "recipe" in dict(flags_in(arguments)):
        raise ConfigError("--recipe is given with a configuration of EasyR1, which states all options: drop one.")
    given = flat(content) | {match[1]: _value(match[2]) for match in overrides}
    kept = [argument for argument in arguments if not _OVERRIDE.fullmatch(argument)]
    if file is not None:
        place = kept.index("--config")
        kept = kept[:place] + kept[place + 2 :]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = translate(given, processes)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(_table(found.lines)), *_notes(found, processes), sep="\n", flush=True)
    _stop(found, kept)
    for name in _PROJECTS:
        os.environ.setdefault(name, str(found.options["project"]))
    if command == "evaluate" or found.values["trainer.val_only"]:
        return "evaluate", [*_as_flags(_to_evaluate(found)), *(flag for flag in kept if flag != IGNORE)]
    return command, [*_as_flags(found.options), *kept]


def _content(arguments: Sequence[str]) -> tuple[Any, str | None]:
    file = next(iter(dict(flags_in(arguments)).get("config", ())), None)
    if file is None or not Path(file).is_file():
        return None, None  # which is told where files of ours are read
    try:
        return yaml.load(Path(file).read_text(encoding="utf-8-sig"), _Loader), file  # a safe loader
    except (yaml.YAMLError, UnicodeDecodeError):
        return None, None


def _value(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.YAMLError:
        return text


def _stop(found: Translation, kept: Sequence[str]) -> None:
    stopped = dict(found.stopped)
    if "reward_funcs" in dict(flags_in(kept)):
        stopped = {key: why for key, why in stopped.items() if not key.startswith("worker.reward.reward_f")}
    if found.refused:
        raise ConfigError(f"{_told(found.refused)} Give other values: without these something else would be trained.")
    if stopped and IGNORE not in kept:
        raise ConfigError(f"{_told(stopped)} Change or remove these keys, or run without them by {IGNORE}.")


def _told(reasons: dict[str, str]) -> str:
    return " ".join(f"{key} {why if why.endswith(('.', '?')) else f'{why}.'}" for key, why in reasons.items())


def _to_evaluate(found: Translation) -> dict[str, Any]:
    options = {**found.options, **{new: found.options[old] for old, new in _EVALUATED.items() if old in found.options}}
    known = flag_names("evaluate")
    options = {name: value for name, value in options.items() if name in known}
    if options.get("temperature") == 0:
        options |= {"num_samples": 0, "temperature": 1.0}
    if (checkpoint := found.values["trainer.load_checkpoint_path"]) is not None:
        options["model_name_or_path"] = checkpoint
    return options


def _as_flags(options: dict[str, Any]) -> Iterable[str]:
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        yield from (f"--{name}", *map(_text, values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _table(lines: Sequence[Line]) -> Iterable[str]:
    yield "A configuration of EasyR1 in options of this library (*: theirs by default):"
    rows = [("key", "ours", "value"), *((line.key + "*" * (not line.is_stated), *line[1:3]) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    yield from (f"  {key:<{widths[0]}}  {ours:<{widths[1]}}  {value}" for key, ours, value in rows)


def _notes(found: Translation, processes: int) -> Iterable[str]:
    theirs = found.values["trainer.nnodes"] * found.values["trainer.n_gpus_per_node"]
    if theirs != processes:
        yield (
            f"Theirs asks for {theirs} processes, this run has {processes}: batches and updates are the same all the "
            f"same. For as many, start with accelerate launch --num_processes {theirs}."
        )
