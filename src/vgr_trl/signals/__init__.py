"""What each token saw: attention to the image and to the instruction, and dependence on the image.

Read `ratios.py` (which tokens are the image, and what is made of attention), then how it is measured: `attention.py`.
Hidden states: `similarity.py`. Regions of an image: `regions.py`. Dependence: `dependency.py`, `perturbation.py`. A
batch: `scoring.py` (any model) and `vgr_trl/measure.py` (in a trainer), `named.py` (what rewards and metrics see).
"""

from vgr_trl.batch import AttentionMass, RolloutSignals
from vgr_trl.signals.attention import AttentionProbe, GenerationProbe
from vgr_trl.signals.dependency import visual_dependency
from vgr_trl.signals.perturbation import add_gaussian_noise, blacken_patches, gaussian_blur, mask_image, perturb_images
from vgr_trl.signals.ratios import (
    ModalityMasks,
    attention_efficiency_index,
    build_modality_masks,
    mdi_balance,
    split_layers,
    token_vision_gain_ratio,
    vision_gain_ratio,
)
from vgr_trl.signals.scoring import RolloutScorer

__all__ = [
    "AttentionMass",
    "AttentionProbe",
    "GenerationProbe",
    "ModalityMasks",
    "RolloutScorer",
    "RolloutSignals",
    "add_gaussian_noise",
    "attention_efficiency_index",
    "blacken_patches",
    "build_modality_masks",
    "gaussian_blur",
    "mask_image",
    "mdi_balance",
    "perturb_images",
    "split_layers",
    "token_vision_gain_ratio",
    "vision_gain_ratio",
    "visual_dependency",
]
