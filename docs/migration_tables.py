"""Write the tables of docs/migration.md from the flags that `vgr-trl train` answers unknown flags with.

python docs/migration_tables.py
"""

import re
from pathlib import Path

from vgr_trl.config_converters.key_tables import load_tables

PAGE = Path(__file__).with_name("migration.md")
MADE = re.compile(r"(?<=<!-- made by docs/migration_tables.py: )([\w-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def make_page() -> str:
    """Return the page with a table per framework between its marks."""
    tables = load_tables("flags")

    def make_table(mark: re.Match[str]) -> str:
        rows = [f"| {_code(row.split(', '))} | {_mark_flags(here)} |" for row, here in tables[mark[1]].items()]
        return "\n".join([f"{mark[1]} -->", f"| {mark[1]} | here |", "|---|---|", *rows, ""])

    return MADE.sub(make_table, PAGE.read_text(encoding="utf-8"))


def _code(flags: list[str]) -> str:
    """Return the first flags of a row as code."""
    return ", ".join([*(f"`{flag}`" for flag in flags[:3]), *["…"] * (len(flags) > 3)])


def _mark_flags(text: str) -> str:
    """Return a text with its flags and commands as code."""
    return re.sub(r"accelerate [^,]*\)\"|--\w+(?: FILE(?:\.py:FUNCTION)?| '.*'| \w+(?=$| for gspo))?", r"`\g<0>`", text)


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
