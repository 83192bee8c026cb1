"""From flags, or the file of `--config`, to groups of options."""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast, get_type_hints

import yaml
from trl import TrlParser

from vgr_trl.cli.flags.advice import with_advice
from vgr_trl.cli.flags.argv import config_apart
from vgr_trl.cli.flags.help import ShowHelp
from vgr_trl.cli.flags.kinds import as_options_take_them
from vgr_trl.cli.flags.plugins import option_classes
from vgr_trl.cli.flags.recipe import recipe_options
from vgr_trl.errors import ConfigError, VGRError

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
