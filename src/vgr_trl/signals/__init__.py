"""Per-token signals: attention to the image and to the instruction, and dependence on the image.

`ratios.py`: masks of image, instruction and region tokens, and the formulas. `probe.py`: attention and hidden states,
measured while a model computes. `plan.py`: the rows and tokens of each of its passes. `perturbation.py`: images made
harder to see, and views of a row. `scoring.py`: a scoring pass over a batch, and the model's head. `scorer.py`:
`RolloutScorer`. `named.py`: the signals that rewards, rules and metrics read.
"""

from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.perturbation import add_gaussian_noise, blacken_patches, gaussian_blur, mask_image, perturb_images
from vgr_trl.signals.probe import AttentionProbe, GenerationProbe
from vgr_trl.signals.ratios import (
    AttentionMass,
    ModalityMasks,
    attention_efficiency_index,
    build_modality_masks,
    mdi_balance,
    split_layers,
    token_vision_gain_ratio,
    vision_gain_ratio,
    visual_dependency,
)
from vgr_trl.signals.scorer import RolloutScorer

__all__ = [
    "AttentionMass", "AttentionProbe", "GenerationProbe", "ModalityMasks", "RolloutScorer", "RolloutSignals",
    "add_gaussian_noise", "attention_efficiency_index", "blacken_patches", "build_modality_masks", "gaussian_blur",
    "mask_image", "mdi_balance", "perturb_images", "split_layers", "token_vision_gain_ratio", "vision_gain_ratio",
    "visual_dependency",
]  # fmt: skip
