"""Each prompt computed once for its G completions, exactly: in scoring, in training and in generation.

`prefix_split.py` finds the prompts of a batch, and `row.py` lays prompts and completions out as one row, over which the
model runs once. `attention.py`, `merged_attention.py` and `state_mixers.py` have the parts of a layer that read the
layout.
`context_manager.py` has `share_prompts`, which replaces a model's `forward` by that of `shared_forward.py` and its
`generate` by that of `shared_generate.py`. `model_support.py` and `exactness.py` say which models can share.
"""

from vgr_trl.sharing.context_manager import share_prompts, whole_groups
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import has_active_dropout
from vgr_trl.sharing.report import SharingReport
from vgr_trl.sharing.shared_forward import ignore_empty_images

__all__ = [
    "SharingReport",
    "has_active_dropout",
    "ignore_empty_images",
    "share_prompts",
    "whole_groups",
    "why_not_share",
]  # fmt: skip
