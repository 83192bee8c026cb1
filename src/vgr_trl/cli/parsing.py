"""Parsers of commands with hundreds of flags, and their help."""

import argparse
import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, cast, get_type_hints

import yaml
from trl import ModelConfig, TrlParser

from vgr_trl.cli.arguments import DataArguments, RewardArguments, RunArguments, with_advice
from vgr_trl.cli.flags import EvaluationArguments, as_options_take_them, config_apart, option_classes, recipe_options
from vgr_trl.config import (
    AliasOptions,
    BlindOptions,
    CreditOptions,
    CriticOptions,
    EfficiencyOptions,
    EvaluateOptions,
    GroupOptions,
    KLOptions,
    MeasureOptions,
    NoisyOptions,
    PerturbationOptions,
    PluginOptions,
    ReportOptions,
)
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.utils import ConfigError, VGRError

# ---------------------------------------------------------------------------------------------------------------------
# Help of commands with hundreds of flags: ours by stage, those of TRL and transformers on request.


_STAGES: dict[type, tuple[str, str]] = {  # in the order of the help
    RunArguments: ("run", "This command"),
    EvaluationArguments: ("run", "This command"),
    DataArguments: ("data", "Data"),
    RewardArguments: ("rewards", "Rewards"),
    ModelConfig: ("model", "Model"),
    DAPOConfig: ("training", "Training"),
    MeasureOptions: ("measure", "Measuring what was looked at"),
    PerturbationOptions: ("perceive", "Dependence on the image"),
    NoisyOptions: ("noisy", "Completions sampled from a perturbed image"),
    BlindOptions: ("blind", "Answers without the image"),
    KLOptions: ("kl", "KL to the reference"),
    CriticOptions: ("critic", "Critic"),
    CreditOptions: ("credit", "Credit per token"),
    GroupOptions: ("choose", "Which groups are trained on"),
    EfficiencyOptions: ("skip", "What is left out of the passes"),
    ReportOptions: ("report", "Records and logs"),
    EvaluateOptions: ("evaluate", "Evaluations of a run"),
    PluginOptions: ("plugins", "Plug-ins"),
    AliasOptions: ("aliases", "Other names"),
}
_NAMED_ONLY = (  # unless asked for
    PerturbationOptions,
    NoisyOptions,
    BlindOptions,
    KLOptions,
    CriticOptions,
    EfficiencyOptions,
    ReportOptions,
    PluginOptions,
    AliasOptions,
)
_OFTEN_USED = {
    ModelConfig: (
        "model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_target_modules",
        "load_in_4bit",
    ),
    DAPOConfig: (
        "output_dir", "learning_rate", "lr_scheduler_type", "num_train_epochs", "max_steps", "seed", "bf16", "use_cpu",
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length",
        "temperature", "reward_weights", "use_vllm", "vllm_mode", "save_steps", "eval_strategy", "eval_steps",
        "report_to",
    ),
}  # fmt: skip
_COLUMN = 34

Default = Callable[[str], Any]
Options = list[dataclasses.Field[Any]]


def render_help(
    groups: Sequence[type],
    command: str,
    default_of: Default,
    *,
    everything: bool = False,
    stage: str | None = None,
) -> str:
    """Return the help of a command.

    Args:
        groups: dataclasses of its options.
        default_of: gives the default of an option where the command has another than the dataclass.
        everything: also the options of TRL and transformers that are seldom used.
        stage: the stage to describe alone; None: all.

    Raises:
        ConfigError: there is no such stage.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    sections = sorted(_sections(groups), key=lambda section: section.order)
    if stage is not None:
        keys = [section.key for section in sections]
        if stage not in keys:
            nearest = get_close_matches(stage, keys, n=1)
            meant = f"Did you mean {nearest[0]}?" if nearest else f"The stages are {', '.join(dict.fromkeys(keys))}."
            raise ConfigError(f"there is no stage {stage} in the help. {meant}")
        return "\n".join(line for part in sections if part.key == stage for line in _full(part, width, default_of))
    lines = [f"usage: vgr-trl {command} [--config FILE.yaml] [--flag value ...]", ""]
    if DAPOConfig in groups and not everything:
        lines += ["The flags of this library and, in a sentence each, the commonest of TRL's. --help STAGE describes"]
        lines += ["those that are only named here, --help training TRL's in full, --help-all lists all.", ""]
    for section in sections:
        if everything or not section.rare:
            lines += [*_full(section, width, default_of, whole=everything), ""]
        elif section.group not in (None, AliasOptions):
            names = ", ".join(option.name for option in section.options)
            lines += [f"{section.title} (described by --help {section.key}):"]
            lines += [*textwrap.wrap(names, width, initial_indent="  ", subsequent_indent="  "), ""]
    return "\n".join(lines).rstrip()


@dataclasses.dataclass(frozen=True)
class _Section:
    """Options under one title; those of TRL and transformers that are seldom used have no group of ours."""

    key: str
    title: str
    options: Options
    group: type | None
    rare: bool = False

    @property
    def order(self) -> int:
        """The place in the help; options of plug-ins come after ours, those of others last."""
        if self.group is None:
            return len(_STAGES) + 1
        return [*_STAGES].index(self.group) if self.group in _STAGES else len(_STAGES)


def _sections(groups: Sequence[type]) -> Iterator[_Section]:
    for group in groups:
        fields = {option.name: option for option in dataclasses.fields(group) if option.init}
        often = _OFTEN_USED.get(group)
        if often is None:
            key, title = _STAGES.get(group, (group.__qualname__, f"Options of the plug-in {group.__qualname__}"))
            yield _Section(key, title, list(fields.values()), group)
            continue
        own = {base: _declared(base, fields) for base in group.__mro__ if base in _STAGES}
        shown = [fields.pop(name) for name in often if name in fields]
        if group is not ModelConfig:
            shown += [fields.pop(name) for name in own.pop(group) if name in fields]
            for base, names in own.items():
                options = [fields.pop(name) for name in names if name in fields]
                yield _Section(*_STAGES[base], options, base, base in _NAMED_ONLY)
        yield _Section(*_STAGES[group], shown, group)
        theirs = "TRL (model)" if group is ModelConfig else "TRL and transformers"
        yield _Section("others", f"Others, of {theirs}", list(fields.values()), None, True)


def _declared(base: type, fields: dict[str, Any]) -> list[str]:
    return [name for name in inspect.get_annotations(base) if name in fields]


def _full(section: _Section, width: int, default_of: Default, *, whole: bool = True) -> list[str]:
    """Describe all options; unless `whole`, those of TRL by their first sentence."""
    lines = [f"{section.title}:"]
    for option in section.options:
        ours = option.name not in _OFTEN_USED.get(section.group or object, ())
        lines += _described(option, width, default_of(option.name), whole=whole or ours)
    return lines


def _described(option: dataclasses.Field[Any], width: int, default: Any, *, whole: bool) -> list[str]:
    text = " ".join(str(option.metadata.get("help", "")).split())
    text = text if whole else text.split(". ")[0].removesuffix(".") + "."
    default = option.default if default is None else default
    if default not in (dataclasses.MISSING, None, ""):
        text += f" (default {getattr(default, 'value', default)})"
    wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
    flag = f"  --{option.name}"
    if len(flag) < _COLUMN - 1:
        return [f"{flag:<{_COLUMN}}{wrapped[0]}", *(" " * _COLUMN + line for line in wrapped[1:])]
    return [flag, *(" " * _COLUMN + line for line in wrapped)]


class ShowHelp(argparse.Action):
    """Prints the help in place of argparse's, which lists every flag twice under one heading."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        groups: Sequence[type],
        command: str,
        default_of: Default,
        everything: bool,
    ) -> None:
        nargs = 0 if everything else "?"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, default=argparse.SUPPRESS)
        self.groups, self.command, self.default_of, self.everything = groups, command, default_of, everything

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print and leave."""
        stage = values if isinstance(values, str) else None
        print(render_help(self.groups, self.command, self.default_of, everything=self.everything, stage=stage))
        parser.exit()


# ---------------------------------------------------------------------------------------------------------------------
# From flags, or the file of `--config`, to groups of options.


DEFAULTS: Mapping[str, Mapping[str, Any]] = {"train": {"logging_steps": 1}}  # of a command, not of its dataclasses


class _Parser(TrlParser):
    """Tells a value that an option does not take in a sentence, where argparse prints hundreds of flags first."""

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (?:-\w/)?(--\w+)[^:]*", r"\1", message)
        raise ConfigError(f"{said}; {self.prog} --help describes the flags.")

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        return list(super().set_defaults_with_config(**as_options_take_them(values, tuple(self.dataclass_types))))


def parse(groups: Sequence[Any], command: str, argv: Sequence[str] | None) -> tuple[Any, ...]:
    """Return the groups of options (dataclasses) filled from flags, else from `--config x.yaml`, else from `--recipe`.

    The options of plug-ins that are named are among the flags; the groups that name plug-ins are given their values.

    Raises:
        ConfigError: an option is refused, by this library or, in their own words, by TRL or transformers.
    """
    argv = sys.argv[1:] if argv is None else argv
    plugins = option_classes(argv, groups)
    groups = (*groups, *plugins)
    parser = _Parser(groups, prog=f"vgr-trl {command}", allow_abbrev=False, add_help=False)
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    for action in parser._actions:
        if action.nargs is None and hints.get(action.dest) == bool | None:  # stands alone too, as `bool` does
            action.nargs, action.const = "?", True
    defaults = DEFAULTS.get(command, {})
    parser.set_defaults(**defaults)
    show_help = partial(ShowHelp, groups=groups, command=command, default_of=defaults.get)
    for flags, everything in ((("-h", "--help"), False), (("--help-all",), True)):
        parser.add_argument(*flags, action=cast(Any, partial(show_help, everything=everything)))
    arguments = _joined(config_apart(argv), "--data_files")
    parser.set_defaults_with_config(**recipe_options(argv))  # which those of the file replace
    try:
        parsed = parser.parse_args_and_config(args=arguments, fail_with_unknown_args=command != "evaluate")
        own = len(groups) - len(plugins)
        values = {name: value for group in parsed[own:] for name, value in vars(group).items()}
        for group in parsed[:own]:
            if values and hasattr(group, "take_plugin_options"):
                group.take_plugin_options(values)
        return tuple(parsed[:own])
    except VGRError:
        raise
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        raise ConfigError(with_advice(str(error))) from error


def _joined(argv: Sequence[str], flag: str) -> list[str]:
    """Return the arguments with all values of a flag, which may be given again, as one with commas between."""
    kept: list[str] = []
    values: list[str] = []
    takes = False
    for argument in argv:
        if argument == flag or argument.startswith(f"{flag}="):
            takes = argument == flag
            values += [] if takes else [argument.split("=", 1)[1]]
        elif takes and not argument.startswith("--"):
            values.append(argument)
        else:
            takes = False
            kept.append(argument)
    return [*kept, flag, ",".join(values)] if values else kept
