"""Options of published methods, as YAML files: `load_recipe("vppo")`, `vgr-trl train --recipe vppo`.

`parse_yaml` reads this library's YAML: without duplicate keys, tags or aliases.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vgr_trl.errors import ConfigError, did_you_mean, error_text

__all__ = ["About", "Recipe", "load_recipe", "read_recipe", "recipe_names"]

RECIPE_FOLDER = Path(__file__).parent
TEMPLATES = RECIPE_FOLDER.parent / "cli" / "templates"  # the files that `vgr-trl init` writes
REWARDS = "reward_funcs", "reward_weights"
# Sets of options that state the same setting; a stated one displaces the others.
SAME_SETTING = {"warmup_ratio", "warmup_steps"}, {"generation_batch_size", "steps_per_generation"}


@dataclass(frozen=True)
class About:
    """Description of the method of a recipe.

    Attributes:
        method: name and purpose, in one line.
        paper: URL.
        code: repository and commit that the recipe follows, or empty.
        signals: signals of a rollout that the method reads, besides rewards.
        passes: forward passes over a rollout, without and with gradients, not counting generation.
        departures: differences from paper and code, one sentence each.
    """

    method: str
    paper: str
    code: str = ""
    signals: Sequence[str] = ()
    passes: Sequence[int] = (0, 1)
    departures: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe: name, description (None if the file has none) and options."""

    name: str
    about: About | None
    options: dict[str, Any] = field(default_factory=dict)


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml"))


def recipe_file(spec: str) -> Path:
    """Return the file of a built-in recipe (by name) or of your own (by path, `.yaml` or `.yml`).

    Raises:
        ConfigError: there is no built-in recipe of this name.
    """
    if Path(spec).suffix in (".yaml", ".yml"):
        return Path(spec)
    if spec not in recipe_names():
        problem = f"There is no recipe {spec!r}.{did_you_mean(spec, recipe_names())}"
        raise ConfigError(f"{problem} Give one of {', '.join(recipe_names())} or a YAML file.")
    return RECIPE_FOLDER / f"{spec}.yaml"


def read_recipe(spec: str) -> Recipe:
    """Read a recipe by name or path.

    Raises:
        ConfigError: the recipe does not exist, is not a YAML mapping, or has an invalid description.
    """
    file = recipe_file(spec)
    values = read_options(file, f"The recipe {file}")
    about = values.pop("about", None)
    try:
        return Recipe(file.stem, None if about is None else About(**about), values)
    except TypeError as error:
        raise ConfigError(f"about of the recipe {file} does not describe a method: {error}") from error


def load_recipe(spec: str) -> dict[str, Any]:
    """Return the options of a recipe: of `DAPOConfig`, and the flags `reward_funcs`, `environment`, `max_short_side`.

    Example:
        >>> options = load_recipe("vppo")
        >>> options.pop("reward_funcs")
        ['accuracy']
        >>> DAPOConfig("run", **options, use_cpu=True, bf16=False).top_p_perception_tokens
        0.4

    Raises:
        ConfigError: as `read_recipe`.
    """
    return read_recipe(spec).options


def override_recipe(
    spec: str, options: Mapping[str, Any], stated: Mapping[str, Any], file: str, method: Collection[str]
) -> dict[str, Any]:
    """Override the options of a recipe by the options of a file, except rewards as `vgr-trl init` writes them.

    Args:
        spec: name of the recipe.
        options: options of the recipe.
        stated: options of the file.
        file: name of the file, for messages.
        method: names of options for rewards, measurements and credit.

    Raises:
        ConfigError: the file has another value than the recipe for an option of `method` that is not a number.
    """
    rewards = {name: stated[name] for name in REWARDS if name in stated}
    if "reward_funcs" in options and rewards in _template_rewards():
        stated = {name: value for name, value in stated.items() if name not in rewards}
        if any(options.get(name) != value for name, value in rewards.items()):
            print(f"{', '.join(rewards)} of {file} are not used: the recipe {spec} sets its own.", file=sys.stderr)
    for name in sorted(options.keys() & stated.keys() & set(method)):
        recipe, own = options[name], stated[name]
        is_number = isinstance(recipe, int | float | dict) and not isinstance(recipe, bool)
        if not (is_number or own == recipe or [own] == recipe):
            conflict = f"{file} has {name} {own}, but the recipe {spec} has {recipe}"
            raise ConfigError(f"{conflict}: remove the line from the file, or give --{name}.")
    return {**drop_displaced(options, stated), **stated}


def drop_displaced(options: Mapping[str, Any], stated: Collection[str]) -> dict[str, Any]:
    """Drop options that are also stated, under the same name or another spelling."""
    displaced = set(stated).union(*(names for names in SAME_SETTING if names & set(stated)))
    return {name: value for name, value in options.items() if name not in displaced}


def _template_rewards() -> list[dict[str, Any]]:
    blanks = {"name": "", "tiny": "", "generation": ""}
    texts = [file.read_text(encoding="utf-8").format(**blanks) for file in TEMPLATES.glob("*.yaml")]
    return [{name: values[name] for name in REWARDS} for values in map(yaml.safe_load, texts)]


MAX_YAML_NODES = 100_000  # with aliases expanded


class StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, and aliases that expand to too many nodes."""

    def get_single_node(self) -> Any:
        """Return the document; raise `ConstructorError` if it is too large with expanded aliases."""
        document = super().get_single_node()
        waiting, seen = [document], 0
        while waiting:
            node, seen = waiting.pop(), seen + 1
            if seen > MAX_YAML_NODES:
                raise ConstructorError(None, None, f"its aliases repeat more than {MAX_YAML_NODES} values", None)
            for part in node.value if isinstance(node, yaml.CollectionNode) else ():
                waiting += part if isinstance(part, tuple) else [part]
        return document

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; raise `ConstructorError` for a duplicate key."""
        seen = set[str]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str":  # `<<` may be given twice
                if key.value in seen:
                    raise ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


@contextmanager
def naming_yaml_errors(what: str) -> Iterator[None]:
    """Convert the errors of reading YAML in this block into a `ConfigError`."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} cannot be read as YAML: {error_text(error)}") from error


def read_options(file: Path, what: str) -> dict[str, Any]:
    """Return the options in a YAML file; messages call the file `what`.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    with naming_yaml_errors(what):
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    if not isinstance(values, dict):
        raise ConfigError(f"{what} has no options: give lines of the form `learning_rate: 1e-5`.")
    return values


def parse_yaml(text: str) -> Any:
    """Parse a YAML text; raise `yaml.YAMLError` if it is invalid."""
    return yaml.load(text, StrictLoader)  # a safe loader
