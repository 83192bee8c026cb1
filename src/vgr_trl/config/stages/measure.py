"""Options of the measurement of attention, and of the rewards made of it."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.ranges import at_least, each, in_range, one_of


@dataclass
class MeasureOptions(PluginOptions):
    """How much attention the generated tokens pay to the image and to the instruction."""

    compute_attention_metrics: bool | None = option(
        None,
        "Log how attention is shared between image and instruction (VGR, AEI, MDI balance, by segment of layers). "
        "None: wherever it can be.",
    )
    attention_source: Annotated[str, one_of("scoring", "generate")] = option(
        "scoring",
        "scoring: attention is measured in one pass without gradients per rollout batch, with any kernel and any "
        "generation backend; generate: while transformers generates, with eager attention.",
    )
    attention_segments: Annotated[str, one_of("thirds", "ends")] = option(
        "thirds", "thirds: early, middle and late thirds of the layers; ends: first, middle and last two."
    )
    vision_token_ids: Annotated[list[int] | None, each(at_least(0))] = option(
        None, "Ids of the image and video placeholder tokens. None: found from the model and processor."
    )
    hidden_similarity_layer: Annotated[int, at_least(-1000)] = option(
        -1,
        "Hidden states that similarity to the image is taken of: 0 is what goes into the first layer, -1 what the last "
        "one returns.",
    )
    hidden_similarity_over: Annotated[str, one_of("max", "mean", "centre")] = option(
        "max",
        "Similarity of a token's hidden state to the image: max or mean of its cosines to the image tokens', or "
        "centre, the cosine to their mean.",
    )
    mdi_balance_ratio: Annotated[float, in_range(1 + 1e-9, 1e30, "above 1")] = option(
        2.0, "VGR (or its inverse) at which the MDI balance is 0; above 1."
    )
