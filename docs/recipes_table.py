"""Write the parts of docs/methods that recipes declare: sources and the index.

python docs/recipes_table.py
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vgr_trl.recipes import About, Recipe, read_recipe, recipe_names

DOCS = Path(__file__).resolve().parent
MADE = re.compile(r"(?<=<!-- made by docs/recipes_table.py: )(.+?) -->\n.*?(?=<!-- end -->)", re.DOTALL)
OPERATIONS = re.compile(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return the pages of docs/methods with the parts of the recipes that their marks name."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((DOCS / "methods").glob("*.md"))}
    marks = {file: found[1].split() for file, text in texts.items() if (found := MADE.search(text))}
    shown = {file: [read_recipe(name) for name in names] for file, names in marks.items() if names != ["index"]}
    names, nav = {recipe.name for recipes in shown.values() for recipe in recipes}, (DOCS / "../mkdocs.yml").read_text()
    mark = f"<!-- made by docs/{Path(__file__).name}: "
    lacking = [f"docs/methods has no page with {mark}{name} -->" for name in recipe_names() if name not in names]
    lacking += [
        f"the nav of mkdocs.yml lacks methods/{file.name}" for file in shown if f"methods/{file.name}" not in nav
    ]
    if lacking:
        raise SystemExit("\n".join(lacking))

    def made(file: Path) -> str:
        lines = _sections(shown[file]) if file in shown else _index(shown)
        return "\n".join([f"{' '.join(marks[file])} -->", *lines, ""])

    return {file: MADE.sub(lambda _: made(file), texts[file]) for file in marks}  # noqa: B023


def _index(shown: dict[Path, list[Recipe]]) -> Iterator[str]:
    counted = dict(OPERATIONS.findall((DOCS / "../benchmarks/findings.md").read_text(encoding="utf-8")))
    yield "| recipe | method | reads | passes | operations |\n|---|---|---|---|---:|"
    rows = [(recipe, page) for page, recipes in shown.items() for recipe in recipes]
    for recipe, page in sorted(rows, key=lambda row: row[0].name):
        about = _about(recipe)
        cells = (about.method, ", ".join(about.signals), " + ".join(map(str, about.passes)))
        yield f"| [`{recipe.name}`]({page.name}) | " + " | ".join([*cells, counted.get(recipe.name, "")]) + " |"


def _sections(recipes: Sequence[Recipe]) -> Iterator[str]:
    yield "\n## Source\n"
    for recipe in recipes:
        file = f"[`{recipe.name}`](../../src/vgr_trl/recipes/{recipe.name}.yaml)"
        departures = f"; {found} departure{'s' * (found > 1)}" if (found := len(_about(recipe).departures)) else ""
        yield f"- {file}: {_source(_about(recipe))}{departures}"
    yield ""


def _about(recipe: Recipe) -> About:
    if recipe.about is None:
        raise SystemExit(f"src/vgr_trl/recipes/{recipe.name}.yaml lacks about")
    return recipe.about


def _source(about: About) -> str:
    address = about.paper if about.paper.startswith("https://") else f"../../{about.paper}"
    return ", ".join([f"[{about.paper.rpartition('/')[2]}]({address})", *([about.code] * bool(about.code))])


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
