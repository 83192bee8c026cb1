"""Each prompt computed once for its G completions, exactly: in scoring, in training and in generation.

`sharing.py` has `share_prompts`, `prefix_forward.py` the pass that computes prompts first and then all completions
behind them, `prefix_cache.py` what completions read of prompts, `generation.py` the same for `generate`, and
`model_support.py` and `probe.py` which models it can be done with.
"""

from vgr_trl.sharing.model_support import has_active_dropout
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.probe import why_not_share
from vgr_trl.sharing.sharing import ignore_empty_images, share_prompts

__all__ = ["SharingReport", "has_active_dropout", "ignore_empty_images", "share_prompts", "why_not_share"]
