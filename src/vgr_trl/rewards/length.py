"""Length: a penalty that grows over the last tokens before the limit."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from vgr_trl.errors import RewardError


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
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        if length > self.max_completion_len:
            return -1.0
        return (free - length) / self.soft_punish_cache

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
    if not _is_integer(max_completion_len) or max_completion_len < 1:
        raise RewardError(
            f"max_completion_len is {max_completion_len!r}: give a number of tokens, an integer of at least 1."
        )
    if not _is_integer(soft_punish_cache) or not 0 <= soft_punish_cache <= max_completion_len:
        raise RewardError(
            f"soft_punish_cache is {soft_punish_cache!r}: give a number of tokens, an integer in "
            f"[0, max_completion_len = {max_completion_len}]."
        )
    return SoftOverlongPunishment(int(max_completion_len), int(soft_punish_cache))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
