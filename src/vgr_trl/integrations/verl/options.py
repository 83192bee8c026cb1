"""The options of this library inside verl and EasyR1: those of its stages that mean something there, by both names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vgr_trl.config.credit import CreditOptions
from vgr_trl.config.measure import MeasureOptions
from vgr_trl.config.perceive import PerceiveOptions
from vgr_trl.config.ranges import check_choice, check_integer, check_number, check_switch
from vgr_trl.errors import ConfigError

NAMES_OF_NOTES = {
    "enable_token_weights": "token_weights",
    "token_weight_clip": "token_weights_clip",
    "token_weight_smooth_sigma": "token_weights_smooth_sigma",
    "token_weight_last_k_layers": "token_weights_last_k_layers",
    "token_weight_topk_ratio": "token_weights_topk_ratio",
    "positive_only": "token_weights_positive_only",
}
_WITHOUT_MEANING = {
    "compute_attention_metrics", "attention_source", "perturbation", "further_perturbations", "dependency_over",
    "patch_size", "noise_std", "blur_radius", "crop_share", "mask_value", "perturb_per", "signals",
}  # fmt: skip


@dataclass
class SignalOptions(MeasureOptions, PerceiveOptions, CreditOptions):
    """What is measured in the actor, and what becomes of it; beside its own options those of the three stages.

    Args:
        estimator: advantage estimator of verl or EasyR1 whose advantages are shaped.
        apply_to: `advantages` are multiplied by token weights, or, as in the notes, the response `mask`.
        collect_attentions: token weights come with the rollout, from matrices of generate; the actor measures none.
        vgr_reward_weight: weight of the VGR reward, compared within each prompt.
        hard_negative_reward_weight: weight of the VGR reward among right answers.
        mdi_reward_weight: weight of the MDI reward.
        right_from: a reward of at least this is a right answer, for the hard negative reward.
        share_prompts: compute each prompt of the measured pass once, where that is possible.
        seed: of the perturbed images.
    """

    estimator: str = field(default="grpo", metadata={"help": "Advantage estimator whose advantages are shaped."})
    apply_to: str = field(
        default="advantages", metadata={"help": "Token weights multiply advantages, or the response mask."}
    )
    collect_attentions: bool = field(
        default=False,
        metadata={"help": "Token weights come with the rollout; the actor measures no attention for them."},
    )
    vgr_reward_weight: float = field(default=0.0, metadata={"help": "Weight of the VGR reward."})
    hard_negative_reward_weight: float = field(
        default=0.0, metadata={"help": "Weight of the VGR reward among right answers."}
    )
    mdi_reward_weight: float = field(default=0.0, metadata={"help": "Weight of the MDI reward."})
    right_from: float = field(default=0.5, metadata={"help": "A reward of at least this is a right answer."})
    share_prompts: str = field(default="auto", metadata={"help": "auto or off: prompts of the measured pass once."})
    seed: int = field(default=42, metadata={"help": "Seed of the perturbed images."})

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
        self.check_measure()
        self.check_perceive()
        self.check_credit()
        self.check_plugins()
        check_choice("apply_to", self.apply_to, ("advantages", "mask"))
        check_choice("share_prompts", self.share_prompts, ("auto", "off"))
        check_switch("collect_attentions", self.collect_attentions)
        check_integer("seed", self.seed, 0)
        for name in ("vgr_reward_weight", "hard_negative_reward_weight", "mdi_reward_weight", "right_from"):
            check_number(name, getattr(self, name), -1e30, 1e30, "that is finite")
        if self.collect_attentions and not self.token_weights:
            raise ConfigError("collect_attentions is on without enable_token_weights, for which alone they are used.")
        if self.apply_to == "mask" and not self.token_weights:
            raise ConfigError("apply_to is mask without enable_token_weights, which alone it steers.")

    @property
    def rewards_attention(self) -> bool:
        """Whether a reward is made of attention."""
        return any((self.vgr_reward_weight, self.hard_negative_reward_weight, self.mdi_reward_weight))

    @property
    def measures_attention(self) -> bool:
        """Whether the pass for old log-probabilities measures attention."""
        return self.rewards_attention or (self.token_weights and not self.collect_attentions)

    @property
    def measures_dependency(self) -> bool:
        """Whether a pass over perturbed images follows it."""
        return self.needs_dependency

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as `read` takes them."""
        plain = type(self)()
        return {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) != getattr(plain, each.name) and each.name not in _WITHOUT_MEANING
        }
