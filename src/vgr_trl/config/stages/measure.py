"""Options of the measurement of attention, and of the rewards made of it."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.ranges import check_choice, check_integer, check_number


@dataclass
class MeasureOptions(PluginOptions):
    """How much attention the generated tokens pay to the image and to the instruction."""

    compute_attention_metrics: bool | None = option(
        None,
        "Log how attention is shared between image and instruction (VGR, AEI, MDI balance, by segment of layers). "
        "None: wherever it can be.",
    )
    attention_source: str = option(
        "scoring",
        "scoring: attention is measured in one pass without gradients per rollout batch, with any kernel and any "
        "generation backend; generate: while transformers generates, with eager attention.",
    )
    attention_segments: str = option(
        "thirds", "thirds: early, middle and late thirds of the layers; ends: first, middle and last two."
    )
    vision_token_ids: list[int] | None = option(
        None, "Ids of the image and video placeholder tokens. None: found from the model and processor."
    )
    hidden_similarity_layer: int = option(
        -1,
        "Hidden states that similarity to the image is taken of: 0 is what goes into the first layer, -1 what the last "
        "one returns.",
    )
    hidden_similarity_over: str = option(
        "max",
        "Similarity of a token's hidden state to the image: max or mean of its cosines to the image tokens', or "
        "centre, the cosine to their mean.",
    )
    mdi_balance_ratio: float = option(2.0, "VGR (or its inverse) at which the MDI balance is 0; above 1.")

    def check_measure(self) -> None:
        """Raise `ConfigError` for values out of range."""
        check_choice("attention_source", self.attention_source, ("scoring", "generate"))
        check_choice("attention_segments", self.attention_segments, ("thirds", "ends"))
        check_number("mdi_balance_ratio", self.mdi_balance_ratio, 1 + 1e-9, 1e30, "above 1")
        check_choice("hidden_similarity_over", self.hidden_similarity_over, ("max", "mean", "centre"))
        check_integer("hidden_similarity_layer", self.hidden_similarity_layer, -1000)
        for token in self.vision_token_ids or []:
            check_integer("vision_token_ids", token, 0)
