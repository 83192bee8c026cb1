"""Declare options, check their values, and tell whether a run uses them."""

import json
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vgr_trl.errors import ConfigError

Needs = str | Mapping[str, Any] | Callable[[Any], str | None]  # see `option`
FACTS = {  # facts of a run that an option may need -> why the option is unused without it
    "attention": "attention is not measured",
    "similarity": "no reward, credit rule or signal reads the similarity",
    "blind_answers": "no reward reads blind answers",
    "changing_weights": "they equal reward_weights",
    "evaluation": "there are no data to evaluate on",
    "length_reward": "there is no length reward",
}
_BOUNDS = {
    "gt": (operator.gt, "above {:g}"),
    "ge": (operator.ge, "of at least {:g}"),
    "lt": (operator.lt, "below {:g}"),
    "le": (operator.le, "of at most {:g}"),
}


class _Metadata(dict[str, Any]):
    """Metadata of an option. TRL's and transformers' parsers pass a copy to argparse, which lacks bounds and needs."""

    def keys(self) -> Any:
        return [key for key in self if key not in (*_BOUNDS, "needs")]

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self.keys()}


def option(default: Any, help: str, *, needs: Needs | None = None, **more: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        default: default value; every instance gets its own copy of a list.
        help: description, shown by `--help`, in docs and in model cards.
        needs: condition for the option to be used: the name of another option that is on, or of an entry of `FACTS`;
            a mapping of options to tuples of values (True: the option is on) of which any holds; or a function that
            takes all options and returns why the option is unused, or None.
        more: `gt`, `ge`, `lt`, `le`, bounds of a number or of each number of a list; arguments of argparse that the
            type does not imply.
    """
    metadata = _Metadata(dict.fromkeys(_BOUNDS), help=help, needs=needs, **more)
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(options: Any, limits: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Raise `ConfigError` for the first option of a dataclass with a value outside of its type or limits.

    Args:
        options: instance of the dataclass.
        limits: bounds `gt`, `ge`, `lt`, `le` of fields that are not made by `option`, by name.
    """
    hints = get_type_hints(type(options))
    for declared in fields(options):
        value, hint = vars(options)[declared.name], hints[declared.name]
        limits_of_option = declared.metadata if "needs" in declared.metadata else (limits or {}).get(declared.name)
        if limits_of_option is not None or (value is None and hint in (int, float)):
            check_value(declared.name, value, hint, **{bound: (limits_of_option or {}).get(bound) for bound in _BOUNDS})


@dataclass
class Checked:
    """Options of a plug-in that are checked when constructed."""

    def __post_init__(self) -> None:
        check_options(self)


def check_value(name: str, value: Any, hint: Any, **bounds: float | None) -> None:
    """Raise `ConfigError` unless a value has a type and is within bounds.

    Args:
        name: name of the option, for the message.
        value: value as given.
        hint: type hint.
        bounds: `gt`, `ge`, `lt`, `le`; None: no bound.
    """
    kinds = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    if (value is None and NoneType in kinds) or any(get_origin(kind) is dict for kind in kinds):
        return
    kind = next(kind for kind in kinds if kind is not NoneType)
    within = {bound: limit for bound, limit in bounds.items() if limit is not None}
    if get_origin(kind) is Literal:
        correct, accepted = value in get_args(kind), f"one of {', '.join(get_args(kind))}"
    elif get_origin(kind) is list:
        correct, accepted = isinstance(value, Sequence) and not isinstance(value, str), f"a list, [{value!r}]"
        for item in value if correct and within else ():
            check_value(name, item, *get_args(kind), **within)
    elif kind is bool:
        correct, accepted = isinstance(value, bool), "True or False"
    elif kind in (int, float):
        correct = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        correct = correct and math.isfinite(value) and all(_BOUNDS[bound][0](value, within[bound]) for bound in within)
        limits = " and ".join(_BOUNDS[bound][1].format(limit) for bound, limit in within.items())
        accepted = f"{'an integer' if kind is int else 'a number'} {limits}".strip()
    else:
        correct, accepted = not isinstance(value, bool | int | float | None), "a text"
    if not correct:
        raise ConfigError(f"{name} is {value!r}: give {accepted}.")


def read_mapping(name: str, value: Any) -> dict[str, Any]:
    """Return an option that is a mapping or a JSON object as a dict; raise `ConfigError` if it is neither."""
    try:
        return dict(json.loads(value) if isinstance(value, str) else value or {})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} is {value!r}: give a JSON object ({error}).") from error


def changed_options(options: Any) -> dict[str, Any]:
    """Return the options of a dataclass that differ from their defaults, by name."""
    values = {field.name: (vars(options)[field.name], _default(field)) for field in fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}


def unused_options(options: Any, absent: Collection[str] = ()) -> dict[str, str]:
    """Return why each option that is not at its default has no effect in a run, by name.

    Args:
        options: instance of a dataclass of options.
        absent: names in `FACTS` that do not hold for the run.
    """
    fields_by_name = type(options).__dataclass_fields__
    reasons = {name: _why_unused(options, fields_by_name[name], absent) for name in changed_options(options)}
    return {name: why for name, why in reasons.items() if why is not None}


def options_in_effect(options: Any, names: Collection[str]) -> dict[str, str]:
    """Return the `help` of the named options that are used and changed, by name.

    Used options that need another option follow, whatever their value.
    """
    stated = [field for field in fields(options) if field.name in names and vars(options)[field.name] is not None]
    used, changed = [field for field in stated if _why_unused(options, field) is None], changed_options(options)
    shown = [field for field in used if field.name in changed]
    shown += [field for field in used if field.name not in changed and _needs(field) not in (None, *FACTS)]
    return {field.name: field.metadata["help"] for field in shown}


RATIO_LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")  # losses that clip importance ratios below and above
_TRL_NEEDS: Mapping[str, Needs] = {  # needs of TRL's options, by name or prefix
    "vllm": "use_vllm",
    "sapo": {"loss_type": ("sapo",)},
    "vespo": {"loss_type": ("vespo",)},
    "delta": {"loss_type": RATIO_LOSSES},
    "epsilon": {"loss_type": RATIO_LOSSES, "epsilon_high": (None,)},
    "scale_rewards": {"advantage_estimator": ("grpo",)},
    "use_bias_correction_kl": "beta",
    **dict.fromkeys(("ref_model_sync_steps", "ref_model_mixup_alpha"), "sync_ref_model"),
    **dict.fromkeys(
        ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), "use_adaptive_entropy"
    ),
    **dict.fromkeys(("num_completions_to_print", "log_unique_prompts"), "log_completions"),
}


def _needs(field: Field[Any]) -> Needs | None:
    of_trl = _TRL_NEEDS.get(field.name) or _TRL_NEEDS.get(field.name.partition("_")[0])
    return field.metadata.get("needs", of_trl)  # type: ignore[no-any-return]


def _why_unused(options: Any, field: Field[Any], absent: Collection[str] = ()) -> str | None:
    """Return why an option is unused: all options that it may need are off or unused. None: it is used."""
    needs, reasons = _needs(field) or {}, []
    if callable(needs):
        return needs(options)
    wanted: Mapping[str, Any] = {needs: True} if isinstance(needs, str) else needs
    for name, values in wanted.items():
        if name in FACTS:
            why = FACTS[name] if name in absent else None
        elif (why := _why_unused(options, type(options).__dataclass_fields__[name], absent)) is None:
            value = vars(options)[name]
            is_met = bool(value) if values is True else value in values
            why = None if is_met else f"{name} is {value}"
        if why is None:
            return None
        reasons.append(why)
    return " and ".join(dict.fromkeys(reasons)) or None


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
