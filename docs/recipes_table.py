"""Write what the pages of docs/methods say of the recipes: options, source and departures, and the index.

python docs/recipes_table.py
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from vgr_trl.cli.arguments import DEFAULT_REWARDS, DEFAULTS, DataArguments, RewardArguments
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.recipes import About, Recipe, read_recipe
from vgr_trl.registries import credit_rules

DOCS = Path(__file__).resolve().parent
MADE = re.compile(r"(?<=<!-- made by docs/recipes_table.py: )(.+?) -->\n.*?(?=<!-- end -->)", re.DOTALL)
OPERATIONS = re.compile(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return the pages of docs/methods with what the recipes that their marks name say."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((DOCS / "methods").glob("*.md"))}
    marks = {file: found[1].split() for file, text in texts.items() if (found := MADE.search(text))}
    shown = {file: [read_recipe(name) for name in names] for file, names in marks.items() if names != ["index"]}

    def made(file: Path) -> str:
        lines = _sections(shown[file]) if file in shown else _index(shown)
        return "\n".join([f"{' '.join(marks[file])} -->", *lines, ""])

    return {file: MADE.sub(lambda _: made(file), texts[file]) for file in marks}  # noqa: B023


def _index(shown: dict[Path, list[Recipe]]) -> Iterator[str]:
    counted = dict(OPERATIONS.findall((DOCS / "../benchmarks/results/recipes.md").read_text(encoding="utf-8")))
    yield "| recipe | method | reads | passes | operations |\n|---|---|---|---|---:|"
    rows = [(recipe, page) for page, recipes in shown.items() for recipe in recipes]
    for recipe, page in sorted(rows, key=lambda row: row[0].name):
        about = _about(recipe)
        cells = (about.method, ", ".join(about.signals), " + ".join(map(str, about.passes)))
        yield f"| [`{recipe.name}`]({page.name}) | " + " | ".join([*cells, counted.get(recipe.name, "")]) + " |"


def _sections(recipes: Sequence[Recipe]) -> Iterator[str]:
    yield "\n## Options\n\nWhere they differ from the defaults of `vgr-trl train`; the files have notes on each.\n"
    defaults = _defaults(recipes)
    for recipe in recipes:
        options = {name: _text(value) for name, value in _flat(recipe).items()}
        given = [f"`{name} {value}`" for name, value in options.items() if value != _text(defaults[name])]
        yield f"- [`{recipe.name}`](../../src/vgr_trl/recipes/{recipe.name}.yaml): {', '.join(given)}"
    yield "\n## Source and departures\n"
    for recipe in recipes:
        yield f"`{recipe.name}`: {_source(_about(recipe))}\n"
        if departures := _about(recipe).departures:
            yield "\n".join(f"- {sentence}" for sentence in departures) + "\n"


def _about(recipe: Recipe) -> About:
    assert recipe.about is not None
    return recipe.about


def _source(about: About) -> str:
    address = about.paper if about.paper.startswith("https://") else f"../../{about.paper}"
    return ", ".join([f"[{about.paper.rpartition('/')[2]}]({address})", *([about.code] * bool(about.code))])


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe, those of plug-ins among them."""
    options = dict(recipe.options)
    return options | options.pop("plugin_options", {})


def _defaults(recipes: Sequence[Recipe]) -> dict[str, Any]:
    rules = [credit_rules.load(name) for recipe in recipes for name in recipe.options.get("credit_rules", ())]
    groups = [DataArguments, RewardArguments, DAPOConfig, *(rule.options for rule in rules)]
    options = [option for group in groups for option in fields(group)]
    found = {each.name: each.default_factory() if each.default is MISSING else each.default for each in options}
    return found | DEFAULTS["train"] | {"reward_funcs": list(DEFAULT_REWARDS)}


def _text(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    items = value if isinstance(value, list) else [value]
    return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
