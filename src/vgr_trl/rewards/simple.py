"""Rewards of form: the format of a completion, and its length."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from vgr_trl.rewards.answers import completion_text
from vgr_trl.utils import RewardError

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


class SoftOverlongPunishment:
    """The reward that `get_soft_overlong_punishment` returns; a class, so that it can be pickled."""

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        self.max_completion_len = max_completion_len
        self.soft_punish_cache = soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """Return the reward of each of the N completions, in [-1, 0], from its token ids."""
        return [self._reward(len(ids)) for ids in completion_ids]

    def _reward(self, length: int) -> float:
        over = length - (self.max_completion_len - self.soft_punish_cache)
        if length > self.max_completion_len:
            return -1.0
        return -over / self.soft_punish_cache if over > 0 else 0.0

    def __repr__(self) -> str:
        return f"get_soft_overlong_punishment({self.max_completion_len}, {self.soft_punish_cache})"


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Return the soft overlong reward: 0 up to Lmax − c tokens, then falling to −1 at Lmax and beyond.

    Equation 13 of DAPO (https://huggingface.co/papers/2503.14476).

    Args:
        max_completion_len: Lmax, in tokens, at least 1.
        soft_punish_cache: c, in tokens, in [0, max_completion_len]; with 0 the reward is 0 up to Lmax and −1 beyond.

    Raises:
        RewardError: an argument is out of range.
    """
    for name, value, smallest, largest in (
        ("max_completion_len", max_completion_len, 1, math.inf),
        ("soft_punish_cache", soft_punish_cache, 0, max_completion_len),
    ):
        if isinstance(value, bool) or not isinstance(value, Integral) or not smallest <= value <= largest:
            raise RewardError(f"{name} is {value!r}: give an integer number of tokens in [{smallest}, {largest}].")
    return SoftOverlongPunishment(int(max_completion_len), int(soft_punish_cache))
