"""What an inspection has found as one page of HTML that holds everything it shows."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from vgr_trl.data.inspect.cost import Budget, cost, histogram
from vgr_trl.data.inspect.findings import Findings
from vgr_trl.data.inspect.tables import headline, sentences, tables

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
TEMPLATE = Path(__file__).with_name("page.html")


def page(findings: Findings, budget: Budget, source: str, seed: int = 0) -> bytes:
    """Return the page, in UTF-8: text of the data is shown as text, images are inside.

    Args:
        source: the title, the path of the data.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters["without"] = without_options
    bins = histogram(findings.lengths) if findings.lengths else []
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        findings=findings,
        source=source,
        headline=headline(findings),
        reasons=sorted(findings.reasons.items(), key=lambda pair: -pair[1].count),
        tables=tables(findings),
        bins=bins,
        most=max((rows for _, _, rows in bins), default=1),
        sentences=sentences(cost(findings.lengths, budget), budget) if findings.lengths else [],
        seed=seed,
    )
    return text.encode("utf-8", "replace")


def _shown(value: Any) -> Any:
    """A text with characters that a reader does not see, or that reorder others, as their numbers."""
    return HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value) if isinstance(value, str) else value


def without_options(text: str, choices: list[tuple[str, str, bool]]) -> str:
    """Return a question without the lines of its options at the end, which the page shows below it."""
    options = "".join(f"\n{letter}. {choice}" for letter, choice, _ in choices)
    return text.removesuffix(options) if options else text
