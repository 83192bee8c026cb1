"""Options of the KL divergence of the policy from its reference."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import Positive, Switch, Weight, one_of

KL_KINDS = ("kl", "abs", "mse", "low_var_kl", "full")


@dataclass
class KLOptions:
    """What keeps the policy near its reference; TRL's `beta` is another way to do so, and never goes with these."""

    kl_coef: Weight = option(
        0.0,
        "Coefficient of the KL to the reference model, besides TRL's beta; its start where kl_type is adaptive; 0: "
        "none.",
    )
    kl_penalty: Annotated[str, one_of(*KL_KINDS)] = option(
        "low_var_kl", f"Estimate of the KL of a token: {', '.join(KL_KINDS)}."
    )
    use_kl_loss: Switch = option(True, "Add the KL to the loss; False: take it from the rewards, token by token.")
    kl_type: Annotated[str, one_of("fixed", "adaptive")] = option(
        "fixed", "fixed, or adaptive: kl_coef follows kl_target."
    )
    kl_target: Positive = option(6.0, "KL that an adaptive coefficient is to keep, in nats per token.")
    kl_horizon: Positive = option(10_000.0, "Completions over which an adaptive coefficient follows.")

    @property
    def penalises_kl(self) -> bool:
        """Whether the KL is taken from the rewards."""
        return self.kl_coef > 0 and not self.use_kl_loss

    @property
    def has_kl_loss(self) -> bool:
        """Whether the KL is added to the loss."""
        return self.kl_coef > 0 and self.use_kl_loss

    @property
    def needs_full_kl(self) -> bool:
        """Whether the KL is taken over all words."""
        return self.kl_coef > 0 and self.kl_penalty == "full"
