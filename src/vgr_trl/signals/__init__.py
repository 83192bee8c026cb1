"""What each token saw: attention to the image and to the instruction, and dependence on the image.

Read `modality.py` (which tokens are the image), `ratios.py` (what is made of attention), then how it is measured:
`attention/`, `decoder.py` (where, and whether it can be). Hidden states: `similarity.py`. Regions of an image:
`region_boxes.py`, `region_tokens.py`. Dependence: `dependency.py`, `perturbation/`. A batch: `scoring.py` with
`head.py` and `image_chunks.py` (any model), `measurement.py` (in a trainer), `named.py` and `reward_columns.py` (what
rewards and metrics see).
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
from vgr_trl.signals.scoring import Measurement, RolloutScorer, Wanted, signals_of_generation

__all__ = [
    "AttentionMass",
    "AttentionProbe",
    "GenerationProbe",
    "Measurement",
    "ModalityMasks",
    "RolloutScorer",
    "RolloutSignals",
    "Wanted",
    "add_gaussian_noise",
    "attention_efficiency_index",
    "blacken_patches",
    "build_modality_masks",
    "gaussian_blur",
    "mask_image",
    "mdi_balance",
    "perturb_images",
    "signals_of_generation",
    "split_layers",
    "token_vision_gain_ratio",
    "vision_gain_ratio",
    "visual_dependency",
]
