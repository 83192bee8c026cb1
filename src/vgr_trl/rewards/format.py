"""Format: thought, then answer; or the tags of both, each for itself."""

from collections.abc import Sequence
from typing import Any

from vgr_trl.rewards.answers.text import completion_text

_HANGUL_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters to Unicode, but nothing to see
_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each completion that is `<think>…</think>` followed by `<answer>…</answer>`, 0 for the others.

    White space around the two parts is allowed; each tag must occur exactly once, and thought and answer must have at
    least one letter, digit or ideograph each (`Rewards` in definitions.md).

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.
        kwargs: what else TRL passes; not used.

    Raises:
        RewardError: a completion is no text.
    """
    return [float(_is_well_formed(completion_text(completion))) for completion in completions]


def tag_count_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return a quarter for each of the four tags that stands exactly once on a line of its own (as in open-r1).

    Behind `<think>` a line must end, in front of `</answer>` one must begin, and both at the tags between them.

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.

    Raises:
        RewardError: a completion is no text.
    """
    return [sum(text.count(line) == 1 for line in _LINES) / 4 for text in map(completion_text, completions)]


def _is_well_formed(text: str) -> bool:
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    answer = rest.lstrip()
    return answer.startswith("<answer>") and _says_something(thought) and _says_something(answer[8:-9])


def _says_something(text: str) -> bool:
    return any(character.isalnum() and character not in _HANGUL_FILLERS for character in text)
