"""Published methods as files of options: `load_recipe("vppo")`, `vgr-trl train --recipe vppo`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.utils import ConfigError, parse_yaml

__all__ = ["About", "Recipe", "load_recipe", "read_recipe", "recipe_names"]

RECIPE_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class About:
    """What a recipe says of its method.

    Attributes:
        method: its name, and what it does, in one line.
        paper: its address.
        code: repository and commit that were read, or empty.
        signals: what it reads of a rollout beside the rewards.
        passes: over the completions of a rollout, beside generation: without and with gradients.
        departures: where the recipe differs from paper and code, a sentence each.
    """

    method: str
    paper: str
    code: str = ""
    signals: Sequence[str] = ()
    passes: Sequence[int] = (0, 1)
    departures: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe: its name, what it is (None: the file says nothing), and its options."""

    name: str
    about: About | None
    options: dict[str, Any] = field(default_factory=dict)


def recipe_names() -> list[str]:
    """Return the names of the recipes of this library."""
    return sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml"))


def recipe_file(spec: str) -> Path:
    """Return the file of a recipe of this library, by name, or of one's own, by path (`.yaml`, `.yml`).

    Raises:
        ConfigError: there is none.
    """
    names = recipe_names()
    own = Path(spec)
    if own.suffix in (".yaml", ".yml"):
        if not own.is_file():
            raise ConfigError(f"The recipe {spec} is no file: give its path, or one of {', '.join(names)}.")
        return own
    if spec not in names:
        nearest = get_close_matches(spec, names, n=1)
        meant = f"Did you mean {nearest[0]}? Else give" if nearest else "Give"
        raise ConfigError(f"There is no recipe {spec!r}. {meant} one of {', '.join(names)}, or a file (my.yaml).")
    return RECIPE_FOLDER / f"{spec}.yaml"


def read_recipe(spec: str) -> Recipe:
    """Return a recipe by its name, or the path of its file.

    Raises:
        ConfigError: there is none, or its file holds no options, or says what no recipe has to say.
    """
    file = recipe_file(spec)
    try:
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"The recipe {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"The recipe {file} holds no options: give lines of the form `learning_rate: 1.0e-6`.")
    about = values.pop("about", None)
    return Recipe(file.stem, None if about is None else _parse_about(about, file), values)


def load_recipe(spec: str) -> dict[str, Any]:
    """Return the options of a recipe: those of `DAPOConfig`, and of the command line `reward_funcs`, `max_short_side`.

    Raises:
        ConfigError: as `read_recipe`.
    """
    return read_recipe(spec).options


def _parse_about(given: Any, file: Path) -> About:
    known = [item.name for item in fields(About)]
    if not isinstance(given, dict) or not {"method", "paper"} <= set(given) <= set(known):
        raise ConfigError(f"about of the recipe {file} is {given!r}: give method and paper, and of {known} what holds.")
    return About(**given)
