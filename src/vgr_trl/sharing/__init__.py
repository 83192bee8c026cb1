"""How a prompt is computed once for its G completions: in scoring, in training and in generation, exactly.

Read `context.py` (`share_prompts`), `forward.py` (prompts first, then completions behind them), `cut.py`, `grouping.py`
and `image_inputs.py` (where a batch is cut), `two_stages.py` and `packing.py` (its two stages; the second without
padding), `caches/` (what completions read of prompts), `generation.py`. What it stands on: `backbone.py`, `fitness.py`
(which models can), `counts.py`. Around it: `heads.py`, `plan.py` (where a run shares, and why not elsewhere).
"""

from vgr_trl.sharing.model_support import has_active_dropout, why_not_share
from vgr_trl.sharing.plan import Place, SharedPasses, SharingPlan, leave_out_empty_images, share_prompts
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.sharing import shuffle_by_group, whole_groups, why_not_regroup
from vgr_trl.utils import replaced

__all__ = [
    "Place",
    "SharedPasses",
    "SharingPlan",
    "SharingReport",
    "has_active_dropout",
    "leave_out_empty_images",
    "replaced",
    "share_prompts",
    "shuffle_by_group",
    "whole_groups",
    "why_not_regroup",
    "why_not_share",
]
