"""Tokens as the pieces of text that they stand for."""

from collections.abc import Callable, Sequence
from itertools import groupby

Decode = Callable[[list[int]], str]  # keeps special tokens, does not clean up

_UNFINISHED = "\ufffd"  # what the first bytes of a character decode to


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return a piece of text for each token; together they are the text of all tokens.

    A character whose bytes are spread over several tokens belongs to the last of them; the others are empty. So are
    bytes that are no text: those of several tokens in a row belong to the token behind them, or to the last. Each
    token is decoded behind the one before it, because some tokenizers drop the space at the start of a text.
    """
    alone = [decode([token]) for token in ids]
    if "".join(alone) == decode(list(ids)):
        return alone
    pieces: list[str] = []
    before = start = 0  # tokens from `start` on belong to a character that is not finished
    for end in range(1, len(ids) + 1):
        context = decode(list(ids[before:start]))
        text = decode(list(ids[before:end]))
        waiting = text.endswith(_UNFINISHED) and end < len(ids)
        if waiting or not text.startswith(context):
            pieces.append("" if waiting else alone[end - 1])
        else:
            pieces.append(text[len(context) :])
        if not waiting:
            before, start = start, end
    return pieces


def prompt_text(ids: Sequence[int], vision_token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of a prompt, with `<image>` for each run of vision tokens."""
    vision = set(vision_token_ids)
    parts = []
    for is_vision, run in groupby(ids, key=lambda token: token in vision):
        parts.append("<image>" if is_vision else decode(list(run)))
    return "".join(parts)
