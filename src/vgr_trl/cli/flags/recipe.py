"""`--recipe NAME`: the options of a recipe, which the file of `--config` overrides, which flags override."""

from collections.abc import Iterable, Sequence
from typing import Any

from vgr_trl.cli.flags.argv import config_values, flags_in
from vgr_trl.cli.flags.names import did_you_mean, plugin_options
from vgr_trl.errors import ConfigError
from vgr_trl.recipes import load_recipe


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
