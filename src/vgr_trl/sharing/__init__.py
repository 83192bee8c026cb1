"""Each prompt computed once for its G completions, exactly: in scoring, in training and in generation.

`sharing.py` has `share_prompts`, which wraps a model's `forward` and `generate`. `prefix_forward.py` computes prompts
first and then completions behind them, which read the layers of `prefix_cache.py`. `model_support.py` and `probe.py`
say which models can share.
"""

from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import has_active_dropout
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.shared_forward import ignore_empty_images, share_prompts

__all__ = ["SharingReport", "has_active_dropout", "ignore_empty_images", "share_prompts", "why_not_share"]
