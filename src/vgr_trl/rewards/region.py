"""The reward for looking at what the question is about."""

from collections.abc import Sequence
from typing import Any

from vgr_trl.registries import declares


@declares(needs=("region_share",))
def region_reward(
    completions: Sequence[Any], region_share: Sequence[float | None], **kwargs: Any
) -> list[float | None]:
    """Return the share of each completion's attention on the image that goes to the boxes of its row, in [0, 1].

    Args:
        completions: N completions.
        region_share: the signal of that name, the mean over the completion's tokens; None where there is no box.
        kwargs: what else TRL passes.
    """
    return list(region_share)
