"""Options of the credit that each token gets."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.ranges import (
    Fraction,
    Share,
    Switch,
    Weight,
    at_least,
    check_fraction,
    check_interval,
    in_range,
    one_of,
)

_CLIP = partial(check_interval, low=0, within=1, meaning="low <= 1 <= high, with low at least 0")


@dataclass
class CreditOptions(PluginOptions):
    """Which tokens get the advantage of their completion, and how much of it."""

    token_weights: Switch = option(False, "Weigh tokens by how much they look at the image (VGR per token).")
    token_weights_topk_ratio: Annotated[float | None, check_fraction] = option(
        None, "Share of tokens that keep a weight; the others get weight 1. None: all."
    )
    token_weights_clip: Annotated[list[float], _CLIP] = option(
        [0.2, 3.0], "Smallest and largest weight before normalisation, 0 <= low <= 1 <= high."
    )
    token_weights_smooth_sigma: Annotated[float, in_range(0, 1e6, "of at least 0")] = option(
        0.0, "Standard deviation of the smoothing of weights along the tokens; 0: none."
    )
    token_weights_last_k_layers: Annotated[int | None, at_least(1)] = option(
        None, "Weigh by the attention of the last so many layers. None: the late segment."
    )
    token_weights_positive_only: Switch = option(False, "Weigh only completions with a positive advantage.")
    enable_perception_filtering: Switch = option(False, "Give credit only to the tokens that depend most on the image.")
    top_p_perception_tokens: Fraction = option(
        0.2, "Share of a completion's tokens that the perception filter keeps, in (0, 1]."
    )
    perception_weighting: Annotated[str, one_of("filter", "soft")] = option(
        "filter", "filter: tokens outside the share get no credit; soft: weights from the dependency instead."
    )
    enable_entropy_filtering: Switch = option(
        False, "Give credit only to tokens of highest entropy; both filters: the union."
    )
    top_p_entropy_tokens: Fraction = option(
        0.2, "Share of a completion's tokens that the entropy filter keeps, in (0, 1]."
    )
    enable_trajectory_reweighting: Switch = option(False, "Scale completions by their mean dependency on the image.")
    trajectory_scaling_min: Share = option(0.8, "Smallest scale of a completion, in [0, 1].")
    use_entropy_penalty: Switch = option(False, "Add entropy_penalty_coef times the mean of -log p to the loss.")
    entropy_penalty_coef: Weight = option(0.06, "Weight of the entropy penalty.")

    @property
    def needs_dependency(self) -> bool:
        """Whether tokens or completions get credit by their dependency on the image, or a signal is made of it."""
        own = self.enable_perception_filtering or self.enable_trajectory_reweighting
        return own or "dependency" in self.readers()

    @property
    def shapes_tokens(self) -> bool:
        """Whether the tokens of a completion get different advantages."""
        own = self.token_weights or self.enable_perception_filtering or self.enable_entropy_filtering
        return own or bool(self.plugin_rules)

    @property
    def shapes_advantages(self) -> bool:
        """Whether any rule of credit is on."""
        return self.shapes_tokens or self.enable_trajectory_reweighting
