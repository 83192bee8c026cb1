"""Options of the KL divergence of the policy from its reference."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_choice, check_number, check_switch

KL_KINDS = ("kl", "abs", "mse", "low_var_kl", "full")


@dataclass
class KLOptions:
    """What keeps the policy near its reference; TRL's `beta` is another way to do so, and never goes with these."""

    kl_coef: float = option(
        0.0,
        "Coefficient of the KL to the reference model, besides TRL's beta; its start where kl_type is adaptive; 0: "
        "none.",
    )
    kl_penalty: str = option("low_var_kl", f"Estimate of the KL of a token: {', '.join(KL_KINDS)}.")
    use_kl_loss: bool = option(True, "Add the KL to the loss; False: take it from the rewards, token by token.")
    kl_type: str = option("fixed", "fixed, or adaptive: kl_coef follows kl_target.")
    kl_target: float = option(6.0, "KL that an adaptive coefficient is to keep, in nats per token.")
    kl_horizon: float = option(10_000.0, "Completions over which an adaptive coefficient follows.")

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

    def check_kl(self) -> None:
        """Raise `ConfigError` for values out of range."""
        check_number("kl_coef", self.kl_coef, 0, 1e30, "of at least 0")
        check_choice("kl_penalty", self.kl_penalty, KL_KINDS)
        check_switch("use_kl_loss", self.use_kl_loss)
        check_choice("kl_type", self.kl_type, ("fixed", "adaptive"))
        check_number("kl_target", self.kl_target, 1e-30, 1e30, "above 0")
        check_number("kl_horizon", self.kl_horizon, 1e-30, 1e30, "above 0")
