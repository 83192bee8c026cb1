"""The reward for describing an image so that the question can be answered without it."""

from collections.abc import Sequence
from typing import Any

from vgr_trl.registries import BLIND_ANSWERS, declares
from vgr_trl.rewards.accuracy import accuracy_reward


@declares(needs=(BLIND_ANSWERS,))
def blind_accuracy_reward(
    completions: Sequence[Any], blind_answers: Sequence[str | None], **kwargs: Any
) -> list[float | None]:
    """Return the accuracy of the answers given from each completion's description of the image alone, 0 or 1.

    Args:
        completions: N completions, of which nothing else counts.
        blind_answers: what was answered; None, which earns 0: the completion describes nothing.
        kwargs: the other columns, as `accuracy_reward` takes them.

    Returns:
        N rewards; None where the row does not say what is right.

    Raises:
        RewardError: as `accuracy_reward`.
    """
    return accuracy_reward([answer or "" for answer in blind_answers], **kwargs)
