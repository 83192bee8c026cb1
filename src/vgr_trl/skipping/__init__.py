"""What changes no parameter and is left out, exactly.

Rows, tokens and padding: read `live.py` (which tokens the loss reads, and which part of a micro-batch has them),
`narrow.py` (inputs of that part, and its outputs for all rows and columns), `fused_head.py` (a head for those tokens
alone), `dealing.py` (which rows run together), `plan.py` (where, and why not elsewhere).

Images: read `vision_cache.py` (image features of a frozen vision tower computed once per rollout), `vision_tower.py`
(is it frozen); `image_processing.py` (pixel inputs made once per rollout, whatever the model).
"""

from vgr_trl.skipping.dealing import deal_by_length, pack_rows, tokens_of
from vgr_trl.skipping.fused_head import only_tokens
from vgr_trl.skipping.image_processing import images_processed_once
from vgr_trl.skipping.live import Extent, Window, extents_of, find_text, find_window, live_tokens
from vgr_trl.skipping.narrow import narrowed, take_rows, widened
from vgr_trl.skipping.plan import SkippingPlan
from vgr_trl.skipping.vision_cache import VisionCache

__all__ = [
    "Extent",
    "SkippingPlan",
    "VisionCache",
    "Window",
    "deal_by_length",
    "extents_of",
    "find_text",
    "find_window",
    "images_processed_once",
    "live_tokens",
    "narrowed",
    "only_tokens",
    "pack_rows",
    "take_rows",
    "tokens_of",
    "widened",
]
