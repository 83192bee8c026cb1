"""`vgr-trl recipes [NAME]`: the published methods that `vgr-trl train --recipe NAME` starts from."""

import argparse
from collections.abc import Sequence

from vgr_trl.recipes import About, read_recipe, recipe_file, recipe_names

LEGEND = """\
passes: over the completions of a rollout, beside generation, without + with gradients. The attention metrics of a run
with images share the first of them; where there is none they are one more (not with --compute_attention_metrics false).
vgr-trl recipes NAME shows one, with departures and numbers; vgr-trl train --recipe NAME starts from it."""


def main(argv: Sequence[str] | None = None) -> int:
    """List the recipes, or print the file of one, and return 0."""
    parser = argparse.ArgumentParser(prog="vgr-trl recipes", description=__doc__)
    parser.add_argument("name", nargs="?", help="print this recipe: its paper, departures, options and their numbers")
    name = parser.parse_args(argv).name
    if name is not None:
        print(recipe_file(name).read_text(encoding="utf-8"), end="")
        return 0
    names = recipe_names()
    width = max(map(len, names)) + 2
    for known in names:
        about = read_recipe(known).about
        assert about is not None  # which the tests hold of every recipe
        reads = ", ".join(about.signals) or "no signal"
        print(f"{known:<{width}}{about.method}")
        print(f"{'':<{width}}{about.paper}; {reads}; {passes(about)} passes")
    print(f"\n{LEGEND}")
    return 0


def passes(about: About) -> str:
    """Return the passes of a method as `without + with` gradients."""
    without, with_gradients = about.passes
    return f"{without} + {with_gradients}"
