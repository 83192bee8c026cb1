"""Text of a model or of data put into Markdown, where it must not become Markdown."""

import json
import re
import unicodedata
from typing import Any

from vgr_trl.reporting.records.json_lines import writable

_FENCE = re.compile(r"`{3,}")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # what CommonMark lets a backslash precede
_LINE_BREAKS = "\u2028\u2029"
_VISIBLE = {"Cc", "Cs", "Co"}  # categories that are shown as their numbers
_DIRECTIONS = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}


def printable(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and lone surrogates shown as `\\x1b`.

    Line feeds stay, tabs too; a carriage return before a line feed is left out. What comes out can neither move the
    cursor of a terminal nor end a line in a reader's eyes only.
    """
    text = text.replace("\r\n", "\n")
    return "".join(character if _is_plain(character) else _number(character) for character in text)


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


def _is_plain(character: str) -> bool:
    if character in "\n\t":
        return True
    if character in _LINE_BREAKS or character in _DIRECTIONS:
        return False
    return unicodedata.category(character) not in _VISIBLE


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
