"""Each prompt computed once for its G completions, exactly: in scoring, in training and in generation.

`context_manager.py` has `share_prompts`, which replaces a model's `forward` by that of `shared_forward.py` and its
`generate` by that of `shared_generate.py`. `prefix_split.py` splits a batch, `prefix_forward.py` computes prompts first
and then completions, which read the layers of `prefix_cache.py`. `lending.py` keeps prompts for several micro-batches.
`model_support.py` and `exactness.py` say which models can share.
"""

from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import has_active_dropout
from vgr_trl.sharing.report import SharingReport
from vgr_trl.sharing.shared_forward import ignore_empty_images

__all__ = ["SharingReport", "has_active_dropout", "ignore_empty_images", "share_prompts", "why_not_share"]
