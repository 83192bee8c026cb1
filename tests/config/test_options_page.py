"""docs/options.md is what its script makes of the options, and pages for other origins name options that there are."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

from trl import ModelConfig

DOCS = Path(__file__).parents[2] / "docs"
ORIGINS = (DOCS / "migration.md", DOCS / "../experiments/README.md")


def test_the_pages_are_in_step_with_the_options():
    script = runpy.run_path(str(DOCS / "options_table.py"))
    assert script["page"]() == (DOCS / "options.md").read_text(encoding="utf-8"), "python docs/options_table.py"
    known = {each.name for group in (*script["GROUPS"], ModelConfig) for each in fields(group)}
    text = "".join(page.read_text(encoding="utf-8") for page in ORIGINS)
    here = re.findall(r"^\|.*\|([^|]*)\|[^|]*\|$", text, re.MULTILINE)
    named = {name for cell in here for name in re.findall(r"`--(\w+)", cell)}
    assert len(named) > 30
    assert named <= known
