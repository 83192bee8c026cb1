"""Text of a model or of data, as it can be printed: nothing in it moves a cursor, reorders a line or hides."""

import re

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


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
