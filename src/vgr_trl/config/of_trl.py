"""Ranges of the options of TRL and transformers, which these check late, or not at all."""

from dataclasses import fields
from types import NoneType
from typing import TYPE_CHECKING, get_args, get_type_hints

from vgr_trl.config.ranges import LARGEST, SMALLEST, check_integer, check_number, is_number
from vgr_trl.errors import ConfigError

if TYPE_CHECKING:
    from vgr_trl.config.dapo import DAPOConfig

_WHOLE_NUMBERS_OF_TRL = (
    "max_prompt_length", "max_completion_length", "num_generations_eval", "num_iterations", "steps_per_generation",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
_NUMBERS = {int: "an integer", float: "a number"}
_RANGES_OF_TRL = {
    "beta": (0, LARGEST, "of at least 0"),
    "epsilon": (0, LARGEST, "of at least 0"),
    "epsilon_high": (0, LARGEST, "of at least 0"),
    "delta": (0, LARGEST, "above 1 + epsilon_high"),
    "learning_rate": (0, LARGEST, "of at least 0"),
    "temperature": (SMALLEST, LARGEST, "above 0"),
    "top_p": (1e-9, 1, "in (0, 1]"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (1e-9, LARGEST, "above 0"),
    "weight_decay": (0, LARGEST, "of at least 0"),
    "max_grad_norm": (0, LARGEST, "of at least 0, where 0 clips nothing"),
    "adam_beta1": (0, 1 - 1e-9, "in [0, 1)"),
    "adam_beta2": (0, 1 - 1e-9, "in [0, 1)"),
    "adam_epsilon": (0, LARGEST, "of at least 0"),
    "top_k": (0, LARGEST, "of at least 0, where 0 keeps all tokens"),
}


def check_options_of_trl(options: "DAPOConfig") -> None:
    """Raise `ConfigError` for options of TRL's or transformers' that are out of range, or None though they may not."""
    hints = get_type_hints(type(options), include_extras=True)
    left_open = {name for name, hint in hints.items() if getattr(options, name) is None and NoneType in get_args(hint)}
    for name in _WHOLE_NUMBERS_OF_TRL:
        if name not in left_open:
            check_integer(name, getattr(options, name), 1)
    check_integer("num_generations", options.num_generations, 2)
    for name in (f"{what}_steps" for what in ("save", "eval") if getattr(options, f"{what}_strategy") == "steps"):
        if (value := getattr(options, name)) is not None and not (is_number(value) and value > 0):
            raise ConfigError(f"{name} is {value!r}: give a number above 0, or {name[:4]}_strategy no.")
    for name, (low, high, meaning) in _RANGES_OF_TRL.items():
        if name not in left_open:
            check_number(name, getattr(options, name), low, high, meaning)
    for field in fields(options):
        if getattr(options, field.name) is None and hints[field.name] in _NUMBERS and field.default is not None:
            raise ConfigError(
                f"{field.name} is None: give {_NUMBERS[hints[field.name]]}, or leave it out for its default, "
                f"{field.default}."
            )
    if options.output_dir is not None and not str(options.output_dir).strip():
        raise ConfigError("output_dir is empty: give a folder, or leave it out.")
    highest = 1 + (options.epsilon if options.epsilon_high is None else options.epsilon_high)
    reads_delta = options.loss_type not in ("cispo", "sapo", "vespo")
    if reads_delta and options.delta is not None and options.delta <= highest:
        raise ConfigError(
            f"delta (clip_ratio_dual) is {options.delta}, which would clip ratios of up to {highest:g}, those of "
            "tokens with positive advantage too: give a number above 1 + epsilon_high, such as 3.0."
        )
    if options.max_steps == 0 or (options.max_steps < 0 and options.num_train_epochs <= 0):
        raise ConfigError(
            f"max_steps is {options.max_steps} and num_train_epochs {options.num_train_epochs}, so nothing would be "
            "trained: give max_steps of at least 1, or more epochs."
        )
