"""Text of a model or of data put into Markdown, where it must not become Markdown."""

import json
import re
from typing import Any

from vgr_trl.printable import printable
from vgr_trl.reporting.records.json_lines import writable

_FENCE = re.compile(r"`{3,}")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # what CommonMark lets a backslash precede


def fenced(text: str, language: str = "text") -> str:
    """Return a fenced block of code with `text` in it, whose fence is longer than any in the text."""
    shown = printable(text)
    longest = max((len(run) for run in _FENCE.findall(shown)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}\n"


def fenced_json(value: Any) -> str:
    """Return a fenced block of JSON with a line for each item of a list or dictionary, numbers as in records."""
    value = writable(value)
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(name))}: {json.dumps(item, ensure_ascii=False)}" for name, item in value.items()]
        start, end = "{", "}"
    else:
        lines = [json.dumps(item, ensure_ascii=False) for item in value]
        start, end = "[", "]"
    return fenced("\n".join([start, ",\n".join(lines), end]), "json")


def inline(text: str) -> str:
    """Return `text` for a heading or the cell of a table: on one line, with all punctuation escaped."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(printable(text).split()))


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters, and how many are left out; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def number(value: float | None) -> str:
    """Return a number with four significant digits, a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are already escaped; its first column is of text, the others of numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
