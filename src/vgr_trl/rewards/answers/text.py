"""Text as rewards read it: completions of TRL, full-width characters, normalised text."""

import re
import unicodedata
from typing import Any

from vgr_trl.errors import RewardError

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_FINAL_MARKS = ".,;:。"
_EXCLAMATION_AFTER_WORD = re.compile(r"(?<=[^\W\d_]{2})[!?]+$")


def completion_text(completion: Any) -> str:
    """Return what the assistant wrote in one completion, its messages joined by line breaks.

    Args:
        completion: as TRL passes it, a string or a list of messages; the content of a message is a string, None or a
            list of parts, of which the text counts. Messages of other roles (tools) do not count.

    Raises:
        RewardError: the completion is neither.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and all(isinstance(message, dict) for message in completion):
        written = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return "\n".join(_content_text(message.get("content")) for message in written)
    raise RewardError(
        f"A completion is a {type(completion).__name__}: pass a string, or a list of messages such as "
        '[{"role": "assistant", "content": "..."}].'
    )


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | dict)
        ]
        return "".join(part for part in parts if isinstance(part, str))
    raise RewardError(
        f"The content of a message is a {type(content).__name__}: pass a string or a list of parts such as "
        '{"type": "text", "text": "..."}.'
    )


def shown(value: Any) -> str:
    """Return a value as messages show it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, of the same length."""
    return text.translate(_FULL_WIDTH)


def normalise(text: str) -> str:
    """Return `text` without differences of case, width, white space and final punctuation.

    An exclamation or question mark goes only after a word, so that 5! stays 5!; a text of punctuation alone stays.
    """
    collapsed = " ".join(half_width(unicodedata.normalize("NFC", text)).casefold().split())
    stripped = collapsed.rstrip(_FINAL_MARKS).rstrip()
    while match := _EXCLAMATION_AFTER_WORD.search(stripped):
        stripped = stripped[: match.start()].rstrip(_FINAL_MARKS).rstrip()
    return stripped or collapsed
