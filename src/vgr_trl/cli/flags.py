"""What stands on a command line, read before any library is imported."""

import ast
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from vgr_trl import registries
from vgr_trl.cli.arguments import RewardFileArguments
from vgr_trl.config_converters.computed import Line, Translation, flat, is_theirs, translate
from vgr_trl.config_converters.easyr1 import THEIRS
from vgr_trl.options import option
from vgr_trl.recipes import load_recipe
from vgr_trl.registries import Registry, option_class
from vgr_trl.utils import ConfigError, StrictLoader, parse_yaml

# ---------------------------------------------------------------------------------------------------------------------
# What stands on a command line and in the file of `--config`, before any parser has read it.


def flags_in(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the flags by the names of their options (`--data-files` is data_files), each with the values behind it."""
    name, values = "", list[str]()
    for argument in argv:
        if argument.startswith("--"):
            if name:
                yield name, values
            flag, equals, value = argument[2:].partition("=")
            name, values = flag.replace("-", "_"), [value] if equals else []
        else:
            values.append(argument)
    if name:
        yield name, values


def config_apart(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--config=FILE` as two of them, the form that TRL reads."""
    parts = (argument.split("=", 1) if argument.startswith("--config=") else [argument] for argument in argv)
    return [part for argument in parts for part in argument]


def config_values(argv: Sequence[str]) -> dict[str, Any]:
    """Return what the file of `--config` holds, nothing if it is none: that is told elsewhere."""
    try:
        values = yaml.safe_load(Path(dict(flags_in(argv))["config"][0]).read_text(encoding="utf-8-sig"))
    except (KeyError, IndexError, OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


# ---------------------------------------------------------------------------------------------------------------------
# Names of flags, read from sources without importing them: a misspelt flag is told at once, not after torch.


_OWN = {
    "train": (
        "cli/arguments.py",
        "cli/arguments.py",
        "config.py", "dapo_config.py", "options.py",
        "config.py",
        "config.py",
    ),
    "evaluate": ("cli/arguments.py", "cli/arguments.py", "cli/flags.py"),
}  # fmt: skip
_OTHERS = {
    "train": {
        "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
        "transformers": ("training_args.py",),
    },
}
_OF_EVERY_COMMAND = ("config", "help", "help_all", "env")


def flag_names(command: str) -> set[str]:
    """Return the names of the options of a command, without dashes; empty if they are not known beforehand."""
    options = _options(command)
    return {*_OF_EVERY_COMMAND, *options} if options else set()


@cache
def _options(command: str) -> dict[str, bool]:
    """The options of a command by name, and whether each is a switch that is on by default; none if not known."""
    own = Path(__file__).parents[1]
    files = [file for pattern in _OWN.get(command, ()) for file in own.glob(pattern)]
    for package, paths in _OTHERS.get(command, {}).items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return {}
        files += [Path(spec.origin).parent / path for path in paths]
    if not files or not all(file.is_file() for file in files):
        return {}
    found: dict[str, bool] = {}
    for file in files:  # subclasses first
        for name, is_on in _fields(file):
            found.setdefault(name, is_on)
    return found


def _fields(file: Path) -> Iterable[tuple[str, bool]]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, _is_true(line.value)


def _is_true(value: ast.expr | None) -> bool:
    """Whether the value of a field is True: as it is, by `option(True, …)`, or by `field(default=True, …)`."""
    if isinstance(value, ast.Call):
        given = [*value.args[:1], *(keyword.value for keyword in value.keywords if keyword.arg == "default")]
        value = given[0] if given else None
    return isinstance(value, ast.Constant) and value.value is True


def check_flags(command: str, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag that `command` does not have, with the nearest that it has."""
    options = _options(command)
    known = {*_OF_EVERY_COMMAND, *_flags(options)}
    for name, _ in flags_in(argv) if options else ():
        if name not in known and name not in (known := known | _flags(plugin_options(argv))):
            raise ConfigError(f"there is no flag --{name}.{did_you_mean(name, known, '--')}")


def _flags(options: Mapping[str, bool]) -> set[str]:
    return {*options, *(f"no_{name}" for name, is_on in options.items() if is_on)}


def plugin_options(argv: Sequence[str]) -> dict[str, bool]:
    """Return the options of plug-ins that are named, which have to be imported for it, and which are on by default."""

    return options_on(argv)


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a sentence with the nearest of the known names, or where to find them."""
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {prefix}{nearest[0]}?" if nearest else " --help lists them, --help-all those of TRL too."


# ---------------------------------------------------------------------------------------------------------------------
# The YAML file of `--config`: checked before its values become defaults of flags.


def check_config_file(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the file of `--config`, if there is one, holds values of known options.

    Args:
        argv: arguments of a command.
        known: names of the options; empty: not known, nothing is checked.
    """
    given = dict(flags_in(argv)).get("config")
    if given is None or not (known := set(known)):
        return
    if not given:
        raise ConfigError("--config is given without a file: give the path of a YAML file.")
    file, known = Path(given[0]), {*known, "env"}
    if not file.is_file():
        raise ConfigError(f"--config is {file}, which is no file: give the path of a YAML file.")
    try:
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no options: give lines of the form `learning_rate: 1e-5`.")
    for key in values:
        if key not in known and key not in (known := known.union(plugin_options(argv))):
            raise ConfigError(f"{file} has {key}, which is no option.{did_you_mean(str(key), known)}")
        if values[key] is False and key.endswith("_strategy"):
            raise ConfigError(f'{file} has {key}: no, which YAML reads as false: write "no" in quotes.')


# ---------------------------------------------------------------------------------------------------------------------
# Flags of `vgr-trl evaluate` besides those of the data.


CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vgr_trl" / "evaluations"


@dataclass
class EvaluationArguments(RewardFileArguments):
    """What is evaluated, and how."""

    model_name_or_path: list[str] | None = option(
        None, "Checkpoint folders, LoRA adapter folders or hub names; several stand side by side."
    )
    model_revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "Allow a model that brings its own code.")
    dtype: str = option("auto", "auto, bfloat16, float16 or float32.")
    num_samples: int = option(8, "k of mean@k and pass@k; 0: greedy only.")
    temperature: float = option(1.0, "Of sampling, above 0.")
    max_completion_length: int = option(512, "In tokens.")
    soft_punish_cache: int | None = option(None, "In tokens, of the reward length.")
    batch_size: int = option(16, "Questions per generation call.")
    blank_images: bool = option(False, "Replace images by grey: what is answered blindly?")
    blind_baseline: bool = option(True, "Answer greedily with grey images too, for the column blind.")
    reward_funcs: list[str] = option([], "Rewards whose means are given too: names, dotted paths, files, as for train.")
    group_by: str | None = option(
        None, "Column; scores are given for each of its values too. Default: family or source; none: none."
    )
    seed: int = option(0, "Of sampling.")
    output_file: str | None = option(None, "Write the numbers there, as JSON.")
    save_completions: bool = option(False, "Add every completion to the JSON.")
    harness_dir: str | None = option(None, "Write the results there in the layout of lm-evaluation-harness.")
    cache_dir: str | None = option(None, f"Folder of evaluations made before (default {CACHE}).")
    use_cache: bool = option(True, "Take an evaluation of the same model, data and settings from the cache.")


# ---------------------------------------------------------------------------------------------------------------------
# `--config theirs.yaml` and `a.b=c` of EasyR1, MTRL and verl: read, translated, printed as a table, put as flags.


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


# ---------------------------------------------------------------------------------------------------------------------
# Values of a YAML file as their options take them: argparse converts and checks texts only.


_NAMES = {float: "a number", int: "an integer", bool: "true or false", str: "a text", list: "a list", dict: "a mapping"}


def as_options_take_them(values: Mapping[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a file by option; one that stands alone where a list is asked for becomes a list.

    Args:
        groups: the dataclasses that the options belong to.

    Raises:
        ConfigError: a value is of a kind that its option does not take; texts are left to the parser.
    """
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    defaults = {option.name: _shown_default(option) for group in groups for option in fields(group)}
    return {
        name: _taken(name, value, _members(hints[name]), defaults[name]) if name in defaults else value
        for name, value in values.items()
    }


def _taken(name: str, value: Any, members: tuple[Any, ...], default: str) -> Any:
    kinds = {get_origin(member) or member for member in members}
    wanted = " or ".join(text for kind, text in _NAMES.items() if kind in kinds)
    if not kinds <= {*_NAMES, NoneType} or (value is None and NoneType in kinds):
        return value
    if value is None:
        raise ConfigError(f"{name} has no value in the file: give {wanted}, or leave its line out{default}.")
    if list in kinds and str not in kinds and not isinstance(value, list | dict):
        value = [value]
    if not _is_one_of(value, kinds):
        raise ConfigError(f"{name} is {value!r} in the file: give {wanted}.")
    inner = {kind for member in members if get_origin(member) is list for kind in get_args(member)} & {*_NAMES}
    for each in value if isinstance(value, list) and len(inner) == 1 else ():
        if not _is_one_of(each, inner) or (isinstance(each, str) and str not in inner):
            raise ConfigError(f"{name} has {each!r} in the file: give a list, each {_NAMES[next(iter(inner))]}.")
    return value


def _is_one_of(value: Any, kinds: set[Any]) -> bool:
    """Whether an option of these kinds takes a value; a text or a list for a text is judged later."""
    if isinstance(value, dict):
        return dict in kinds
    if isinstance(value, list):
        return list in kinds or str in kinds
    if isinstance(value, bool):
        return bool in kinds or str in kinds
    if isinstance(value, int):
        return bool({int, float, str} & kinds)
    return not isinstance(value, float) or bool({float, str} & kinds)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _shown_default(option: Any) -> str:
    return "" if option.default is MISSING else f" for its default, {option.default}"


# ---------------------------------------------------------------------------------------------------------------------
# `--recipe NAME`: the options of a recipe, which the file of `--config` overrides, which flags override.


def named_recipe(argv: Sequence[str]) -> str | None:
    """Return the recipe that the flags name, or else the file of `--config` (`recipe: NAME`); None: none is named.

    Raises:
        ConfigError: `--recipe` stands without a name, or twice.
    """
    given = [values for name, values in flags_in(argv) if name == "recipe"]
    if len(given) > 1:
        raise ConfigError("--recipe is given twice: give one, and the options of the other as flags.")
    if given and not given[0]:
        raise ConfigError("--recipe is given without a name: `vgr-trl recipes` lists them.")
    named = given[0][0] if given else config_values(argv).get("recipe")
    return None if named is None else str(named)


def recipe_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options of the recipe that is named, none if none is.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be read.
    """
    name = named_recipe(argv)
    return {} if name is None else load_recipe(name)


def check_recipe(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the recipe, if one is named, has options that are known.

    Args:
        argv: arguments of a command.
        known: names of its options; empty: not known, nothing is checked.
    """
    options = recipe_options(argv)
    known = set(known) - {"recipe", "config"}
    for key in options if known else ():
        if key not in known and key not in (known := known.union(plugin_options(argv))):
            raise ConfigError(
                f"The recipe {named_recipe(argv)} has {key}, which is no option.{did_you_mean(str(key), known)}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The options of plug-ins that a command line, its file, or its recipe names: they become flags like any other.


NAMING: Mapping[str, Registry] = {
    "credit_rules": registries.credit_rules,
    "signals": registries.signals,
    "perturbation": registries.perturbations,
    "further_perturbations": registries.perturbations,
    "reward_funcs": registries.rewards,
}


def option_classes(argv: Sequence[str], known: Sequence[type] = ()) -> list[type]:
    """Return the dataclasses of options of the plug-ins that are named.

    Args:
        argv: arguments of a command.
        known: the dataclasses of its other options.

    Raises:
        VGRError: a plug-in is not found, or one of its options has the name of another option.
    """
    owners = {field.name: "vgr-trl" for group in known for field in fields(group)}
    found: list[type] = []
    for registry, name in _named(argv):
        options = option_class(registry.load(name.partition("[")[0]), name)
        if options is None or options in found:
            continue
        for field in fields(options):
            if (owner := owners.setdefault(field.name, name)) is not name:
                raise ConfigError(f"The {registry.kind} {name} has an option {field.name}, as {owner} has: rename it.")
        found.append(options)
    return found


def options_on(argv: Sequence[str]) -> dict[str, bool]:
    """Return the options of the plug-ins that are named, and whether each is a switch that is on by default."""
    return {field.name: field.default is True for options in option_classes(argv) for field in fields(options)}


def _named(argv: Sequence[str]) -> Iterator[tuple[Registry, str]]:
    given = recipe_options(argv) | config_values(argv) | dict(flags_in(argv))
    for flag, registry in NAMING.items():
        names = given.get(flag) or []
        texts = [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)]
        yield from ((registry, name) for name in texts)
