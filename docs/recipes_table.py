"""Makes what the pages of docs/methods say of the recipes: their options, cost, source and departures, and the index.

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
from vgr_trl.recipes import RECIPE_FOLDER, About, Recipe, read_recipe
from vgr_trl.registries import credit_rules

DOCS = Path(__file__).resolve().parent
MADE = re.compile(r"(?<=<!-- made by docs/recipes_table.py: )(.+?) -->\n.*?(?=<!-- end -->)", re.DOTALL)
OPERATIONS = re.compile(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", re.MULTILINE)
NOTE = re.compile(r"^ *(\w+):[^#\n]+# +(.+)$", re.MULTILINE)  # behind an option in a recipe


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
    yield "| recipe | method | paper, code read | reads | passes |\n|---|---|---|---|---|"
    rows = [(recipe, page) for page, recipes in shown.items() for recipe in recipes]
    for recipe, page in sorted(rows, key=lambda row: row[0].name):
        about = _about(recipe)
        reads = ", ".join(about.signals) or "no signal"
        yield f"| [`{recipe.name}`]({page.name}) | {about.method} | {_source(about)} | {reads} | {_passes(about)} |"


def _measured(recipes: Sequence[Recipe]) -> Iterator[str]:
    """What the runs of experiments/recipe_runs.yaml came to."""
    page = DOCS.parent / "benchmarks" / "results" / "recipe_runs.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if rows := [line for recipe in recipes for line in text.splitlines() if line.startswith(f"| {recipe.name} |")]:
        yield "\n### From the demo's start, at its sizes and learning rate\n"
        yield from re.findall(r"^\| run .*\n.*\n\| start .*", text, re.MULTILINE)
        yield from rows
        yield "\nHow: [recipe_runs](../../benchmarks/results/recipe_runs.md)."


def _sections(recipes: Sequence[Recipe]) -> Iterator[str]:
    yield from _measured(recipes)
    linked = ", ".join(f"[`{recipe.name}`](../../src/vgr_trl/recipes/{recipe.name}.yaml)" for recipe in recipes)
    yield f"\n## Options\n\nOf {linked}, beside the defaults of `vgr-trl train`."
    yield "Notes are the file's: the name in the code that was read, where a number stands, what it is elsewhere.\n"
    columns = " | ".join(f"`{recipe.name}`" for recipe in recipes)
    yield f"| option | {columns} | default | note |\n|---|{'---|' * len(recipes)}---|---|"
    options, notes, defaults = [_flat(recipe) for recipe in recipes], _notes(recipes), _defaults(recipes)
    for name in dict.fromkeys(name for given in options for name in given):
        values = " | ".join(_text(given[name]) if name in given else "default" for given in options)
        yield f"| `{name}` | {values} | {_text(defaults[name])} | {notes.get(name, '')} |"
    yield "\n## Cost\n"
    yield "| recipe | passes without + with gradients | operations of a step over those of `dapo` |\n|---|---:|---:|"
    counted = dict(OPERATIONS.findall((DOCS / "../benchmarks/findings.md").read_text(encoding="utf-8")))
    for recipe in recipes:
        yield f"| `{recipe.name}` | {_passes(_about(recipe))} | {counted.get(recipe.name, 'not counted')} |"
    yield (
        "\nPasses are over the completions of a rollout, beside generation; operations are those of\n"
        "[operations](../../benchmarks/findings.md#operations-by-recipe), of one size. More: [cost](../cost.md)."
    )
    yield "\n## Source\n"
    yield from (f"- `{recipe.name}`: {_source(_about(recipe))}" for recipe in recipes)
    yield "\n## Departures\n"
    for recipe in recipes:
        departures = _about(recipe).departures
        yield f"`{recipe.name}`" + (":\n" if departures else ": none stated.")
        yield from (f"- {sentence}" for sentence in departures)
        yield ""


def _about(recipe: Recipe) -> About:
    assert recipe.about is not None
    return recipe.about


def _passes(about: About) -> str:
    return " + ".join(map(str, about.passes))


def _source(about: About) -> str:
    address = about.paper if about.paper.startswith("https://") else f"../../{about.paper}"
    return ", ".join([f"[{about.paper.rpartition('/')[2]}]({address})", *([about.code] * bool(about.code))])


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe, those of plug-ins among them."""
    options = dict(recipe.options)
    return options | options.pop("plugin_options", {})


def _notes(recipes: Sequence[Recipe]) -> dict[str, str]:
    """What stands behind the options in the files, with the name of the recipe unless all say the same."""
    found = [
        dict(NOTE.findall((RECIPE_FOLDER / f"{recipe.name}.yaml").read_text(encoding="utf-8"))) for recipe in recipes
    ]
    common = {name: note for name, note in found[0].items() if all(notes.get(name) == note for notes in found)}
    named = {
        name: "; ".join(
            f"`{recipe.name}`: {notes[name]}" for recipe, notes in zip(recipes, found, strict=True) if name in notes
        )
        for notes in found
        for name in notes
    }
    return named | common


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
