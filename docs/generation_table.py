"""Write the table of docs/generation.md: model families with images under continuous batching.

python docs/generation_table.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]

from sharing_table import TITLES  # noqa: E402
from support.models.batched import (  # noqa: E402
    as_trl_has_it,
    batched,
    greedy_equals,
    largest_distance,
    prompts_of,
)
from support.models.families import FAMILIES, OTHERS, Family, build  # noqa: E402

from vgr_trl.batching import why_not_batched  # noqa: E402

PAGE = ROOT / "docs" / "generation.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
NUM_IMAGES = {"text": (0, 0), "one": (1, 1), "several": (2, 3), "mixed": (1, 0)}


def make_table() -> str:
    """Return the table as Markdown, and below it the families that are refused."""
    families = {name: family for name, family in {**FAMILIES, **OTHERS}.items() if family.picture}
    refused: dict[str, list[str]] = {}
    lines = ["| | " + " | ".join(NUM_IMAGES) + " |", "|---" * (1 + len(NUM_IMAGES)) + "|"]
    for name, family in families.items():
        if (why := why_not_batched(build(family))) is not None:
            refused.setdefault(why, []).append(TITLES[name])
        else:
            cells = (distance(family, images) for images in NUM_IMAGES.values())
            lines.append(" | ".join([f"| {TITLES[name]}", *cells]) + " |")
    reasons = "; ".join(f"{', '.join(names)} ({why})" for why, names in refused.items())
    return "\n".join([*lines, "", f"Refused: {reasons}.", ""])


def distance(family: Family, images: tuple[int, int]) -> str:
    """Return the largest distance of sampled log-probabilities, once greedy tokens have been compared.

    Raises:
        AssertionError: greedy tokens differ from those of `generate`.
    """
    model, prompts = build(family), prompts_of(family, images)
    assert greedy_equals(model, prompts), family.name
    _, completions, logps = batched(model, *as_trl_has_it(prompts))
    return f"{largest_distance(model, family, prompts, completions, logps):.1e}".replace("e-0", "e-")


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: make_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
