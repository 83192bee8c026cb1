"""Credit for the tokens that look at the image most: the part of AT-RL that what is public of it is enough for."""

from dataclasses import dataclass

import torch

from vgr_trl import registries
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.config.option import option
from vgr_trl.config.ranges import Fraction, check_values
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.masked import check_shapes
from vgr_trl.registries import declares
from vgr_trl.signals.ratios import late_layers


@dataclass
class AnchorOptions:
    """Which tokens are anchors."""

    top_p_anchor_tokens: Fraction = option(0.15, "Share of a completion's tokens that are kept as anchors, in (0, 1].")

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("anchor_tokens")
@declares(needs=("attention",), options=AnchorOptions)
def anchor_tokens(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: AnchorOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the tokens of most attention on the image, the mean over heads and late layers; all without an image.

    AT-RL (https://huggingface.co/papers/2602.11455) finds that some 15 % of the tokens carry the connection to the
    image. It also clusters them by their attention and weighs the clusters, which is not done here.
    """
    mass = signals.attention
    assert mass is not None
    looked = mass.vision[late_layers(len(mass.vision))].mean(0)  # (N, T)
    check_shapes("anchor_tokens", mask, attention=looked)
    blind = (mass.num_vision == 0).to(mask.device).unsqueeze(1)
    return top_fraction_mask(looked, mask, options.top_p_anchor_tokens) | (mask & blind), {"attention": looked}
