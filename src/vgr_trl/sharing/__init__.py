"""Each prompt computed once for its G completions, exactly: in scoring, in training and in generation.

`prefix_split.py` finds the prompts of a batch, and `row.py` lays prompts and completions out as one row, over which the
model runs once. `attention.py` has the parts of a layer that read the layout: attention, and mixers with a state.
`context_manager.py` has `share_prompts`, which replaces a model's `forward` and `generate` by those of
`shared_forward.py`. `model_support.py` and `exactness.py` say which models can share.
"""

from vgr_trl.sharing.context_manager import share_prompts, whole_groups
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import SharingReport, has_active_dropout, ignore_empty_images

__all__ = [
    "SharingReport",
    "has_active_dropout",
    "ignore_empty_images",
    "share_prompts",
    "whole_groups",
    "why_not_share",
]  # fmt: skip
