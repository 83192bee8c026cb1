"""Text of a model or of data put into Markdown, where it must not become Markdown."""

import json
import re
from typing import Any

from vgr_trl.reporting.records.json_lines import writable

_FENCE = re.compile(r"`{3,}")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # what CommonMark lets a backslash precede
# Control characters but line feed and tab, surrogates, characters of private use, line breaks that only some readers
# see, marks of writing direction, and characters that show nothing, in which a text can be hidden; but for those that
# join or select the shapes of their neighbours, as emoji and Persian have them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
    "\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c"
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and what does not show as `\\x1b`.

    Line feeds stay, tabs too; a carriage return before a line feed is left out. What comes out can neither move the
    cursor of a terminal nor end a line in a reader's eyes only.
    """
    return _HIDDEN.sub(lambda found: _number(found[0]), text.replace("\r\n", "\n"))


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


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
