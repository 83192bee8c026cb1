"""Text of data that a model's tokenizer would read as one of its special tokens, as the end of a turn for example."""

import re
from collections.abc import Sequence
from typing import Any

from vgr_trl.data.rows.text.marks import placed, texts_of


def special_tokens(processor: Any) -> re.Pattern[str] | None:
    """Return a pattern that finds the special tokens of a processor's tokenizer, None if it has none.

    Args:
        processor: of a model, or its tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    for name in ("image_token", "video_token", "audio_token"):
        if isinstance(token := getattr(processor, name, None), str):
            found.add(token)
    longest_first = sorted(found - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def special_problem(special: re.Pattern[str] | None, conversation: Sequence[dict[str, Any]]) -> str | None:
    """Return which special token a text of a conversation has first, in one sentence, or None if there is none."""
    found = None if special is None else next(filter(None, map(special.search, texts_of(placed(conversation)))), None)
    if found is None:
        return None
    return f"its text has {found[0]!r}, which the model's tokenizer reads as a special token: take it out"
