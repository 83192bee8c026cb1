"""Parse options of `vgr-trl train` and `evaluate`: flags, `--config`, `--recipe`, and other frameworks' files."""

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from vgr_trl.cli.arguments import DataArguments, EvaluationArguments, raise_config_errors
from vgr_trl.config_converters import convert, read_configuration
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.options import check_value
from vgr_trl.recipes import drop_displaced, load_recipe, override_recipe
from vgr_trl.strict_yaml import parse_yaml

MAX_STAGES_ON_A_PAGE = 4  # with more stages, --help lists the stages only
# Stages that define a method by its rewards, measurements and credit.
METHOD_STAGES = "reward", "credit", "plugin", "perturbation", "measure", "noisy", "blind"


# Flags of users' scripts, EasyR1 and verl -> the option they set.
ALIASES = {
    "eval_num_generations": "num_generations_eval",
    "prompt_preview_chars": "prompt_preview_length",
    "completion_preview_chars": "completion_preview_length",
    "out_dir": "output_dir",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_dual": "delta",
    "late_reward_weights": "reward_weights",
    "token_weight_clip": "token_weights_clip",
    "loss_avg_mode": "loss_type",
}
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "seq": "grpo"}  # values of `loss_avg_mode`
SEGMENTED = "use_segmented_reward_weights"  # early_reward_weights alone switch them on


def _read_loss_type(read: Any, text: str) -> Any:
    return read(LOSS_TYPES.get(text, text))


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('_', '-')}"]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show each flag once, and its default unless it is None."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.option_strings[0]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Help(argparse.Action):
    """Print the options of a stage (`--help kl`) or all stages (`--help-all`), or a line per stage if they are many."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, str) and values not in parser.stages:
            raise ConfigError(f"--help has no group {values}: give one of {', '.join(parser.stages)}.")
        if not (self.const or values) and len(parser.stages) > MAX_STAGES_ON_A_PAGE:
            print("\nOptions, by group:")
            for name, group in parser.stages.items():
                title = shorten(str(group.title).rpartition(" [")[0], 72, placeholder=" …")
                print(f"  {name:<14}{len(group._group_actions):>3}  {title}")
            print(f"\n{parser.prog} --help kl shows one group, --help-all every option.")
            parser.exit()
        parser._action_groups = [parser.stages[values]] if values else list(parser.stages.values())
        parser.print_help()
        parser.exit()


class _Parser(HfArgumentParser):
    """Group the options by stage; raise `ConfigError` instead of printing a usage of hundreds of flags."""

    def __init__(self, groups: Sequence[Any], command: str) -> None:
        self.stages: dict[str, argparse._ArgumentGroup] = {}
        super().__init__(
            groups,
            prog=f"vgr-trl {command}",
            usage=f"vgr-trl {command} [--config FILE.yaml] [--flag value ...]",
            allow_abbrev=False,
            add_help=False,
            formatter_class=partial(_Formatter, max_help_position=32),
        )
        if command == "train":
            self.set_defaults(logging_steps=1)
        self.hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
        self.options: dict[str, argparse.Action] = {}
        for action in self._actions:
            if self.options.setdefault(action.dest, action) is not action:
                action.help = argparse.SUPPRESS  # --no_x of x
            elif action.type is string_to_bool:
                action.nargs, action.const = "?", True  # `--flag` alone means true, also if the default is None
        for alias, name in ALIASES.items():
            if name in self.options:
                self._option_string_actions |= dict.fromkeys(_spellings(alias), self.options[name])
        if (loss := self.options.get("loss_type")) is not None:
            self.add_argument(*_spellings(SEGMENTED), nargs="?", help=argparse.SUPPRESS)
            loss.type = partial(_read_loss_type, loss.type)
        self.add_argument("--config")
        self.add_argument("--help", "-h", action=_Help, nargs="?", const=False)
        self.add_argument("--help-all", "--help_all", action=_Help, nargs=0, const=True)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Add an argument group per dataclass that declares options, titled by its docstring."""
        hints, left = get_type_hints(dtype), {each.name: each for each in fields(dtype) if each.init}
        for base in dtype.__mro__:
            for name in inspect.get_annotations(base):
                if (each := left.pop(name, None)) is None:
                    continue
                if base.__module__.startswith("vgr_trl."):
                    stage = re.sub("(Options|Arguments|Config)$", "", base.__name__).lower()
                    title = re.split(r"[;:(]|\.?\n|\.$", base.__doc__ or stage)[0].strip()
                else:
                    stage, title = "trl", "TRL and transformers"
                section = self.stages.get(stage) or self.add_argument_group(f"{title} [{stage}]")
                self.stages[stage], each.type = section, hints[name]
                self._parse_dataclass_field(section, each)  # type: ignore[arg-type]

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Accept several numbers in a word, as in (0.5,2.0)."""
        if action.nargs == "+" and action.type in (int, float):
            arg_strings = [number for word in arg_strings for number in re.split(r"\s*,\s*", word.strip("()[] "))]
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        message = re.sub(r"^argument (?:-\w/)?(--\w+)[^:]*", r"\1", message)
        raise ConfigError(f"{message}; {self.prog} --help describes the flags.")

    def to_words(self, values: Mapping[str, Any]) -> list[str]:
        """Convert options of a file to command-line words; set values without a word for them as defaults."""
        words = []
        for name, value in values.items():
            action = self.options[name]
            if isinstance(value, list) and value and action.nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif isinstance(value, bool) and action.type not in (int, float, string_to_bool):
                action.default = value  # scale_rewards: false, share_prompts: on
            elif isinstance(value, str | int | float):
                words.append(f"--{name}={value}")
            else:
                check_value(name, value, self.hints[name])
                action.default = value
        return words


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a sentence that suggests the closest known name, or where to find the names."""
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]}?" if nearest else " --help-all lists them."


def parse(groups: Sequence[Any], command: str, argv: Sequence[str], ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Parse flags, `--config x.yaml` and `--recipe`, in this order of precedence, into dataclasses.

    Args:
        groups: dataclasses of options.
        command: name for messages, and for defaults of its own.
        ignored: options of other commands, skipped with a message; the file's `reward_funcs` is skipped with them.

    Raises:
        ConfigError: an option is refused by this library, TRL or transformers.
    """
    parser = _Parser(groups, command)
    given, rest = parser.parse_known_args(argv)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    left_out = [_option_name(flag) for flag in flags]
    for flag, name in zip(flags, left_out, strict=True):
        if name not in ignored:
            raise ConfigError(f"Unknown flag {flag}.{did_you_mean(flag, parser._option_string_actions)}")
    if rest and not rest[0].startswith("--"):
        raise ConfigError(f"{rest[0]!r} is not a flag or its value: remove it, or quote the value that it is part of.")
    typed = [_option_name(word) for word in argv if word.startswith("--")]
    stated = _rename_aliases(dict.fromkeys(typed), "The command line")
    if SEGMENTED in typed and not {"early_reward_weights", "config", "recipe"} & stated.keys():
        raise ConfigError(f"--{SEGMENTED} needs --early_reward_weights: give them, or drop the flag.")
    values = {} if given.config is None else _read_config_file(Path(given.config), parser.options, ignored)
    recipe = vars(given).get("recipe") or values.get("recipe")
    if recipe is not None:
        options = _check_names(load_recipe(str(recipe)), f"The recipe {recipe}", parser.options)
        method = {action.dest for stage in METHOD_STAGES for action in parser.stages[stage]._group_actions}
        values = override_recipe(str(recipe), options, drop_displaced(values, stated), str(given.config), method)
    if left_out:
        print(f"Without effect here: {', '.join(left_out)}.", file=sys.stderr)
    words = parser.to_words(drop_displaced(values, stated))
    with raise_config_errors():
        return parser.parse_args_into_dataclasses(
            [*words, *argv], return_remaining_strings=True, look_for_args_file=False
        )[: len(groups)]


def _option_name(flag: str) -> str:
    return flag[2:].partition("=")[0].replace("-", "_")


def _rename_aliases(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options under their own names; raise `ConfigError` if an option and its alias are both given."""
    for alias, name in ALIASES.items():
        if {alias, name} <= values.keys():
            raise ConfigError(f"{where} has {alias} and {name}, which are the same option: give one of them.")
    return {ALIASES.get(name, name): value for name, value in values.items()}


def _read_config_file(file: Path, known: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
    """Read the options of the `--config` file, and export its environment variables (`env`)."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {file}, which cannot be read as YAML: {error_text(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no options: give lines of the form `learning_rate: 1e-5`.")
    os.environ.update({name: str(value) for name, value in (values.pop("env", None) or {}).items()})
    left_out = [name for name in values if name not in known and name in ignored]
    if left_out:
        left_out += ["reward_funcs"] * ("reward_funcs" in values)
        print(f"Without effect here: {', '.join(left_out)}.", file=sys.stderr)
    return _check_names({name: value for name, value in values.items() if name not in left_out}, str(file), known)


def _check_names(values: dict[str, Any], where: str, known: Collection[str]) -> dict[str, Any]:
    """Return the options of a file under their own names; raise `ConfigError` for an unknown option."""
    values = _rename_aliases(values, where)
    values.pop(SEGMENTED, None)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where} has {name}, which is not an option.{did_you_mean(str(name), known)}")
        if value is False and name.endswith("_strategy"):
            raise ConfigError(f'{where} has {name}: no, which YAML reads as false: write "no" in quotes.')
    return values


def convert_flags(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Convert a configuration of EasyR1, MTRL or verl among the flags into flags of this library, and print the table.

    Returns the command (`evaluate` instead of `train` if `val_only` is set) and its flags.

    Raises:
        ConfigError: a key is unknown or unsupported, and `--ignore_unknown_keys` is not given.
    """
    given, kept = read_configuration(argv)
    if given is None:
        return command, list(argv)
    found = convert(given, int(os.environ.get("WORLD_SIZE", "1")))
    flags = {word.partition("=")[0] for word in kept}
    evaluates = command == "evaluate" or bool(found["trainer.val_only"])
    if os.environ.get("RANK", "0") == "0":
        print(found.format_table("--verbose" in flags), flush=True)
    found.check("--ignore_unknown_keys" in flags, "--reward_funcs" in flags, evaluates)
    for name in ("WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.setdefault(name, str(found.options["project"]))
    options = found.options
    if evaluates:
        known = {each.name for group in (DataArguments, EvaluationArguments) for each in fields(group)}
        options = {name: value for name, value in found.evaluation_options().items() if name in known}
        command, kept = "evaluate", [word for word in kept if word != "--ignore_unknown_keys"]
    words = []
    for name, value in options.items():
        items = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(json.dumps(each) if isinstance(each, dict | bool) else str(each) for each in items)]
    return command, [*words, *kept]
