"""What changes no parameter and is left out, exactly.

Images: read `vision.py` (image features of a model computed once per rollout), `vision_plan.py` (where, and why not
elsewhere), `vision_images.py` (the images of a call, and what they are recognised by), `vision_features.py` (the
features of each), `vision_store.py` (how many are kept), `vision_tower.py` (what computes them, and whether it has
changed).
"""

from vgr_trl.skipping.vision import VisionOnce
from vgr_trl.skipping.vision_plan import VisionPlan

__all__ = ["VisionOnce", "VisionPlan"]
