"""Options of the credit that each token gets."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.ranges import (
    check_choice,
    check_fraction,
    check_integer,
    check_interval,
    check_number,
    check_switch,
)

_SWITCHES = (
    "token_weights", "token_weights_positive_only", "enable_perception_filtering", "enable_entropy_filtering",
    "enable_trajectory_reweighting", "use_entropy_penalty",
)  # fmt: skip


@dataclass
class CreditOptions(PluginOptions):
    """Which tokens get the advantage of their completion, and how much of it."""

    token_weights: bool = option(False, "Weigh tokens by how much they look at the image (VGR per token).")
    token_weights_topk_ratio: float | None = option(
        None, "Share of tokens that keep a weight; the others get weight 1. None: all."
    )
    token_weights_clip: list[float] = option(
        [0.2, 3.0], "Smallest and largest weight before normalisation, 0 <= low <= 1 <= high."
    )
    token_weights_smooth_sigma: float = option(
        0.0, "Standard deviation of the smoothing of weights along the tokens; 0: none."
    )
    token_weights_last_k_layers: int | None = option(
        None, "Weigh by the attention of the last so many layers. None: the late segment."
    )
    token_weights_positive_only: bool = option(False, "Weigh only completions with a positive advantage.")
    enable_perception_filtering: bool = option(False, "Give credit only to the tokens that depend most on the image.")
    top_p_perception_tokens: float = option(
        0.2, "Share of a completion's tokens that the perception filter keeps, in (0, 1]."
    )
    perception_weighting: str = option(
        "filter", "filter: tokens outside the share get no credit; soft: weights from the dependency instead."
    )
    enable_entropy_filtering: bool = option(
        False, "Give credit only to tokens of highest entropy; both filters: the union."
    )
    top_p_entropy_tokens: float = option(
        0.2, "Share of a completion's tokens that the entropy filter keeps, in (0, 1]."
    )
    enable_trajectory_reweighting: bool = option(False, "Scale completions by their mean dependency on the image.")
    trajectory_scaling_min: float = option(0.8, "Smallest scale of a completion, in [0, 1].")
    use_entropy_penalty: bool = option(False, "Add entropy_penalty_coef times the mean of -log p to the loss.")
    entropy_penalty_coef: float = option(0.06, "Weight of the entropy penalty.")

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

    def check_credit(self) -> None:
        """Raise `ConfigError` for values out of range."""
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        if self.token_weights_topk_ratio is not None:
            check_fraction("token_weights_topk_ratio", self.token_weights_topk_ratio)
        check_interval("token_weights_clip", self.token_weights_clip, 0, 1, "low <= 1 <= high, with low at least 0")
        check_number("token_weights_smooth_sigma", self.token_weights_smooth_sigma, 0, 1e6, "of at least 0")
        if self.token_weights_last_k_layers is not None:
            check_integer("token_weights_last_k_layers", self.token_weights_last_k_layers, 1)
        check_fraction("top_p_perception_tokens", self.top_p_perception_tokens)
        check_fraction("top_p_entropy_tokens", self.top_p_entropy_tokens)
        check_number("trajectory_scaling_min", self.trajectory_scaling_min, 0, 1, "in [0, 1]")
        check_number("entropy_penalty_coef", self.entropy_penalty_coef, 0, 1e30, "of at least 0")
        check_choice("perception_weighting", self.perception_weighting, ("filter", "soft"))
