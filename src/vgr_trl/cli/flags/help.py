"""Help of commands with hundreds of flags: ours by stage, those of TRL and transformers on request."""

import argparse
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from trl import ModelConfig

from vgr_trl.cli.flags.arguments import DataArguments, RewardArguments, RunArguments
from vgr_trl.config import (
    AliasOptions,
    ChooseOptions,
    CreditOptions,
    CriticOptions,
    DAPOConfig,
    EvaluateOptions,
    KLOptions,
    MeasureOptions,
    PerceiveOptions,
    PluginOptions,
    ReportOptions,
    SkipOptions,
)

_TITLES: dict[type, str] = {
    RunArguments: "This command",
    DataArguments: "Data",
    RewardArguments: "Rewards",
    DAPOConfig: "Training",
    MeasureOptions: "Measuring what was looked at",
    PerceiveOptions: "Dependence on the image",
    KLOptions: "KL to the reference",
    CriticOptions: "Critic",
    CreditOptions: "Credit per token",
    ChooseOptions: "Which groups are trained on",
    SkipOptions: "What is left out of the passes",
    ReportOptions: "Records and logs",
    EvaluateOptions: "Evaluations of a run",
    PluginOptions: "Plug-ins",
    AliasOptions: "Other names",
}
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


def render_help(groups: Sequence[type], command: str, everything: bool = False) -> str:
    """Return the help of a command.

    Args:
        groups: dataclasses of its options.
        command: its name.
        everything: also the options of TRL and transformers that are seldom used.
    """
    lines = [f"usage: vgr-trl {command} [--config FILE.yaml] [--flag value ...]", ""]
    if not everything and DAPOConfig in groups:
        lines += ["The flags of this library and the commonest of TRL's; --help-all lists all of them.", ""]
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    for title, options in _sections(groups, everything):
        lines.append(f"{title}:")
        for option in options:
            lines += _described(option, width)
        lines.append("")
    return "\n".join(lines).rstrip()


def _sections(groups: Sequence[type], everything: bool) -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    for group in groups:
        fields = {option.name: option for option in dataclasses.fields(group) if option.init}
        often = _OFTEN_USED.get(group)
        if often is None:
            yield _TITLES.get(group, f"Options of the plug-in {group.__qualname__}"), list(fields.values())
            continue
        own = {base: _declared(base, fields) for base in group.__mro__ if base in _TITLES}
        shown = [fields.pop(name) for name in often if name in fields]
        if group is ModelConfig:
            yield "Model", shown
        else:
            yield _TITLES[group], [*shown, *(fields.pop(name) for name in own.pop(group) if name in fields)]
        for base, names in own.items():
            if base is AliasOptions and not everything:
                continue
            yield _TITLES[base], [fields.pop(name) for name in names if name in fields]
        if everything:
            yield (
                f"Others, of {'TRL (model)' if group is ModelConfig else 'TRL and transformers'}",
                list(fields.values()),
            )


def _declared(base: type, fields: dict[str, Any]) -> list[str]:
    return [name for name in inspect.get_annotations(base) if name in fields]


def _described(option: dataclasses.Field[Any], width: int) -> list[str]:
    text = " ".join(str(option.metadata.get("help", "")).split())
    if option.default not in (dataclasses.MISSING, None, ""):
        text += f" (default {getattr(option.default, 'value', option.default)})"
    wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
    flag = f"  --{option.name}"
    if len(flag) < _COLUMN - 1:
        return [f"{flag:<{_COLUMN}}{wrapped[0]}", *(" " * _COLUMN + line for line in wrapped[1:])]
    return [flag, *(" " * _COLUMN + line for line in wrapped)]


class ShowHelp(argparse.Action):
    """Prints the help in place of argparse's, which lists every flag twice under one heading."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, groups: Sequence[type], command: str, everything: bool
    ) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS)
        self.groups, self.command, self.everything = groups, command, everything

    def __call__(self, parser: Any, *args: Any, **kwargs: Any) -> None:
        """Print and leave."""
        print(render_help(self.groups, self.command, self.everything))
        parser.exit()
