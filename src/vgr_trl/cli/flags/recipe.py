"""`--recipe NAME`: the options of a recipe, which the file of `--config` overrides, which flags override."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.cli.flags.config_file import config_apart
from vgr_trl.cli.flags.names import did_you_mean, plugin_options
from vgr_trl.errors import ConfigError
from vgr_trl.recipes import load_recipe


def named_recipe(argv: Sequence[str]) -> str | None:
    """Return the recipe that the flags name, or else the file of `--config` (`recipe: NAME`); None: none is named.

    Raises:
        ConfigError: `--recipe` stands without a name, or twice.
    """
    if sum(argument.split("=")[0] == "--recipe" for argument in argv) > 1:
        raise ConfigError("--recipe is given twice: give one, and the options of the other as flags.")
    for place, argument in enumerate(argv):
        if argument == "--recipe":
            if place + 1 == len(argv) or argv[place + 1].startswith("--"):
                raise ConfigError("--recipe is given without a name: `vgr-trl recipes` lists them.")
            return argv[place + 1]
        if argument.startswith("--recipe="):
            return argument.removeprefix("--recipe=")
    named = config_values(argv).get("recipe")
    return None if named is None else str(named)


def recipe_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options of the recipe that is named, none if none is.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be read.
    """
    name = named_recipe(argv)
    return {} if name is None else load_recipe(name)


def config_values(argv: Sequence[str]) -> dict[str, Any]:
    """What the file of `--config` holds, nothing if it is none: that is told elsewhere."""
    arguments = config_apart(argv)
    place = arguments.index("--config") + 1 if "--config" in arguments else len(arguments)
    try:
        values = yaml.safe_load(Path(arguments[place]).read_text(encoding="utf-8-sig"))
    except (IndexError, OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def check_recipe(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the recipe, if one is named, has options that are known.

    Args:
        argv: arguments of a command.
        known: names of its options; empty: not known, nothing is checked.
    """
    options = recipe_options(argv)
    known = set(known) - {"recipe", "config"}
    for key in options if known else ():
        if key not in known and key not in (known := known | plugin_options(argv)):
            raise ConfigError(
                f"The recipe {named_recipe(argv)} has {key}, which is no option.{did_you_mean(str(key), known)}"
            )
