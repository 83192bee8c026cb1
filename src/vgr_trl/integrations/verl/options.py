"""The options of this library inside verl and EasyR1: those of its stages that mean something there, by both names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vgr_trl.config import PERTURBATION_CONFLICTS, CreditOptions, MeasureOptions, PerturbationOptions, check_conflicts
from vgr_trl.options import FACTS, changed_options, check_options, option, unused_options
from vgr_trl.utils import ConfigError

NAMES_OF_NOTES = {
    "enable_token_weights": "token_weights",
    "token_weight_clip": "token_weights_clip",
    "token_weight_smooth_sigma": "token_weights_smooth_sigma",
    "token_weight_last_k_layers": "token_weights_last_k_layers",
    "token_weight_topk_ratio": "token_weights_topk_ratio",
    "positive_only": "token_weights_positive_only",
}
_MEASURED = ("attention", "dependency", "entropies", "logps")  # what rules of credit may read here
_WITHOUT_MEANING = {
    "compute_attention_metrics", "attention_source", "perturbation", "further_perturbations", "dependency_over",
    "patch_size", "noise_std", "blur_radius", "diffusion_steps", "crop_share", "mask_value", "perturb_per", "signals",
    "hidden_similarity_layer", "hidden_similarity_over",
}  # fmt: skip


@dataclass
class SignalOptions(MeasureOptions, PerturbationOptions, CreditOptions):
    """What is measured in the actor, and what becomes of it; beside its own options those of the three stages."""

    estimator: str = option("grpo", "Advantage estimator of verl or EasyR1 whose advantages are shaped.")
    apply_to: Literal["advantages", "mask"] = option(
        "advantages", "Token weights multiply advantages, or the response mask."
    )
    collect_attentions: bool = option(
        False, "Token weights come with the rollout; the actor measures no attention for them."
    )
    vgr_reward_weight: float = option(0.0, "Weight of the VGR reward, compared within each prompt.")
    hard_negative_reward_weight: float = option(0.0, "Weight of the VGR reward among right answers.")
    mdi_reward_weight: float = option(0.0, "Weight of the MDI reward.")
    right_from: float = option(0.5, "A reward of at least this is a right answer, for the hard negative reward.")
    share_prompts: Literal["auto", "off"] = option(
        "auto", "auto: each prompt of the measured pass is computed once, where it can be; off."
    )
    seed: int = option(42, "Seed of the perturbed images.", ge=0)

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> "SignalOptions":
        """Return the options of a mapping, named as here or as in the notes.

        Raises:
            ConfigError: an option is unknown, without meaning here, given twice, or out of range.
        """
        known = {each.name for each in fields(cls)} - _WITHOUT_MEANING
        values: dict[str, Any] = {}
        for key, value in dict(given or {}).items():
            name = NAMES_OF_NOTES.get(key, key)
            if name not in known:
                accepted = ", ".join(sorted(known | set(NAMES_OF_NOTES)))
                raise ConfigError(f"The option {key} is not known here: give some of {accepted}.")
            if name in values:
                raise ConfigError(f"The option {name} is given twice, as {key} too: give it once.")
            values[name] = list(value) if name == "token_weights_clip" else value
        options = cls(**values)
        options.check()
        return options

    def check(self) -> None:
        """Raise `ConfigError` for values out of range, and for options that would have no effect."""
        check_options(self)
        self.check_plugins()
        check_conflicts(self, PERTURBATION_CONFLICTS)
        for need, readers in self.readers().items():
            if need not in _MEASURED:
                raise ConfigError(
                    f"{readers[0]} reads {need}, which is not measured here: give one that reads no more than "
                    f"{', '.join(_MEASURED)}."
                )
        for name, why in self.without_effect().items():
            raise ConfigError(f"{name} is given, but {why}: leave it out, or switch on what it steers.")

    def without_effect(self) -> dict[str, str]:
        """Return why each option that is not at its default steers nothing, by name."""
        absent = FACTS.keys() - ({"attention"} if self.measures_attention else set())
        perturbs = self.needs_dependency or self.uses_perception_loss
        own = {
            "collect_attentions": None if self.token_weights else "enable_token_weights is off",
            "apply_to": None if self.token_weights else "enable_token_weights is off",
            "right_from": None if self.hard_negative_reward_weight else "hard_negative_reward_weight is 0",
            "mdi_balance_ratio": None if self.mdi_reward_weight else "mdi_reward_weight is 0",
            "share_prompts": None if self.measures_attention else "the actor measures no attention",
            "seed": None if perturbs else "nothing is measured on perturbed images",
        }
        reasons = unused_options(self, absent) | {name: why for name, why in own.items() if why}
        return {name: reasons[name] for name in changed_options(self) if name in reasons}

    @property
    def rewards_attention(self) -> bool:
        """Whether a reward is made of attention."""
        return any((self.vgr_reward_weight, self.hard_negative_reward_weight, self.mdi_reward_weight))

    @property
    def measures_attention(self) -> bool:
        """Whether the pass for old log-probabilities measures attention."""
        weighs = self.token_weights and not self.collect_attentions
        return weighs or self.rewards_attention or "attention" in self.readers()

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as `read` takes them."""
        plain = type(self)()
        return {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) != getattr(plain, each.name) and each.name not in _WITHOUT_MEANING
        }


ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "vgr": {},
    "vgr_vppo": {"enable_perception_filtering": True, "enable_trajectory_reweighting": True},
    "vgr_token_weights": {"token_weights": True},
}
LOSSES = ("vgr", "vgr_vppo", "vgr_papo")  # verl's vanilla loss, and the terms that the options switch on


def options_of(adv_estimator: str, given: Mapping[str, Any] | None, loss_mode: str | None = None) -> SignalOptions:
    """Return the options of a run: those given, on top of what the names of estimator and loss switch on.

    Args:
        adv_estimator: of the configuration.
        given: options, named as in `SignalOptions` or in the notes.
        loss_mode: of the configuration; None where the trainer has no registry of losses.

    Raises:
        ConfigError: an option is unknown, out of range, or would have no effect.
    """
    stated = {NAMES_OF_NOTES.get(key, key) for key in given or ()}
    named = {name: value for name, value in ESTIMATORS.get(adv_estimator, {}).items() if name not in stated}
    options = SignalOptions.read(named | dict(given or {}))
    shapes = options.shapes_advantages or options.rewards_attention
    if shapes and adv_estimator not in ESTIMATORS:
        raise ConfigError(
            f"Options of this library shape advantages, but adv_estimator is {adv_estimator!r}, which does not read "
            f"them: give one of {', '.join(ESTIMATORS)}, and {adv_estimator!r} as the option estimator."
        )
    terms = options.use_entropy_penalty or options.uses_perception_loss or options.der_loss_weight1 > 0
    if loss_mode is not None and terms and loss_mode not in LOSSES:
        raise ConfigError(
            f"Options of this library add terms to the loss, but loss_mode is {loss_mode!r}, which does not read them: "
            f"give one of {', '.join(LOSSES)}."
        )
    if loss_mode == "vgr_papo" and not options.uses_perception_loss:
        raise ConfigError("loss_mode is vgr_papo, but perception_loss_weight is 0: give it a weight, such as 0.01.")
    return options
