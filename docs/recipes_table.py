"""Makes the table and the departures of docs/recipes.md of the recipes.

python docs/recipes_table.py
"""

import re
from pathlib import Path

from vgr_trl.recipes import read_recipe, recipe_names

PAGE = Path(__file__).resolve().parent / "recipes.md"
MADE = re.compile(r"(?<=<!-- made by docs/recipes_table.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADING = "| recipe | method | paper, code read | reads | passes |\n|---|---|---|---|---|"


def page() -> str:
    """Return the page with what the recipes say."""
    rows, departures = [HEADING], ["", "## Departures"]
    for name in recipe_names():
        about = read_recipe(name).about
        assert about is not None
        sources = [f"[{about.paper.rpartition('/')[2]}]({_address(about.paper)})", *([about.code] * bool(about.code))]
        linked = f"[`{name}`](../src/vgr_trl/recipes/{name}.yaml)"
        reads = ", ".join(about.signals) or "no signal"
        rows.append(
            f"| {linked} | {about.method} | {', '.join(sources)} | {reads} | {' + '.join(map(str, about.passes))} |"
        )
        if about.departures:
            departures += ["", f"`{name}`", "", *(f"- {sentence}" for sentence in about.departures)]
    made = "\n".join([*rows, *departures, ""])
    return MADE.sub(lambda _: made, PAGE.read_text(encoding="utf-8"))


def _address(paper: str) -> str:
    return paper if paper.startswith("https://") else f"../{paper}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
