"""The options of this library inside verl and EasyR1: those of its stages that mean something there, by both names."""

import importlib
import inspect
from collections.abc import Iterable, Mapping
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


# ---------------------------------------------------------------------------------------------------------------------
# The names under which estimators and losses are registered, and the options that each switches on.


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


# ---------------------------------------------------------------------------------------------------------------------
# What of verl and EasyR1 is relied on, checked against the installed package when it is hung in.


@dataclass(frozen=True)
class Point:
    """A name that is used, with the parameters that it is called with.

    Attributes:
        module: where it is.
        name: dotted, within the module.
        parameters: that it has to take by name.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return what is not there, None if all is."""
        try:
            found: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} ({error})"
        for part in self.name.split("."):
            if not hasattr(found, part):
                return f"{self.module}.{self.name}"
            found = getattr(found, part)
        if not self.parameters:
            return None
        taken = inspect.signature(found).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            return None
        lacking = [name for name in self.parameters if name not in taken]
        return f"{self.module}.{self.name}({', '.join(lacking)})" if lacking else None


_ESTIMATE = ("token_level_rewards", "response_mask", "index")
_LOSS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights")
CORE = "verl.trainer.ppo.core_algos"
OF_VERL = (
    Point(CORE, "ADV_ESTIMATOR_REGISTRY"),
    Point(CORE, "POLICY_LOSS_REGISTRY"),
    Point(CORE, "register_adv_est"),
    Point(CORE, "get_adv_estimator_fn"),
    Point(CORE, "compute_grpo_outcome_advantage", _ESTIMATE),
    Point(CORE, "register_policy_loss"),
    Point(CORE, "get_policy_loss_fn"),
    Point(CORE, "compute_policy_loss_vanilla", _LOSS),
    Point(CORE, "agg_loss", ("loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens")),
    Point("verl.workers.engine.base", "EngineRegistry.register", ("model_type", "backend", "device", "vendor")),
    Point(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.forward_step",
        ("micro_batch", "loss_function", "forward_only"),
    ),
    Point("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead._get_packed_pad_size"),
    Point("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead.get_data_parallel_group"),
    Point("verl.utils.tensordict_utils", "get_non_tensor_data", ("data", "key", "default")),
    Point("verl.utils.tensordict_utils", "assign_non_tensor_stack"),
    Point("verl.models.transformers.qwen2_vl", "_custom_flash_attention_forward"),
    Point("verl.models.transformers.monkey_patch", "is_trl_available"),
    Point("verl.workers.utils.padding", "no_padding_2_padding"),
    Point("verl.workers.utils.padding", "response_from_nested"),
    Point("transfer_queue", "kv_batch_get", ("keys", "partition_id", "select_fields")),
    Point("transfer_queue", "kv_batch_put", ("keys", "partition_id", "fields")),
    Point("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
    Point("verl.trainer.ppo.v1.trainer_base", "register_trainer"),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._compute_old_log_prob", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._compute_advantage", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._update_actor", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._val_metrics_update", ("reward_extra_infos_dict",)),
)
ACTOR_OF_EASYR1 = (
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor._forward_micro_batch", ("micro_batch", "temperature")),
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor.compute_log_prob", ("data",)),
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor.update_policy", ("data",)),
    Point("verl.trainer.core_algos", "register_adv_estimator"),
    Point("verl.trainer.core_algos", "ADV_ESTIMATOR_MAP"),
    Point("verl.trainer.core_algos", "compute_policy_loss", ("old_log_probs", "log_probs", "advantages")),
    Point("verl.trainer.core_algos", "average_loss", ("mode",)),
)
OF_EASYR1 = (
    *ACTOR_OF_EASYR1,
    Point("verl.protocol", "DataProto.from_dict", ("tensors",)),
    Point("verl.single_controller.base.decorator", "Dispatch.ONE_TO_ALL"),
    Point("verl.single_controller.base.decorator", "Dispatch.DP_COMPUTE_PROTO"),
    Point("verl.single_controller.base.decorator", "register", ("dispatch_mode",)),
    Point("verl.workers.fsdp_workers", "FSDPWorker.init_model"),
    Point("verl.workers.fsdp_workers", "FSDPWorker.compute_log_probs", ("data",)),
    Point("verl.trainer.ray_trainer", "RayPPOTrainer.fit"),
    Point("verl.trainer.ray_trainer", "RayPPOTrainer._balance_batch", ("batch", "metrics")),
    Point("verl.trainer.ray_trainer", "compute_advantage", ("data", "adv_estimator", "gamma", "lam")),
    Point("verl.trainer.ray_trainer", "reduce_metrics"),
    Point("verl.trainer.main", "Runner"),
    Point("verl.trainer.main", "FSDPWorker"),
    Point("verl.trainer.main", "RayPPOTrainer"),
)


def check_points(points: Iterable[Point], tested: str) -> None:
    """Raise `ConfigError` that names what the installed package does not have.

    Args:
        points: that are relied on.
        tested: package and version that have them.
    """
    lacking = list(dict.fromkeys(missing for point in points if (missing := point.missing()) is not None))
    if lacking:
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = f"verl {version('verl')} is installed"
        except PackageNotFoundError:
            installed = "verl is not installed as a package"
        raise ConfigError(f"{installed}, and lacks {'; '.join(lacking)}: install {tested}, which this is tested with.")
