"""Options inside verl and EasyR1, and signals in rewards, advantages and loss terms.

verl and EasyR1 call registered estimators and losses with rewards and a mask, but without the rest of the batch. The
trainer therefore passes measured signals through a context variable.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from vgr_trl.config import (
    PERTURBATION_CONFLICTS,
    CreditOptions,
    MeasureOptions,
    PerturbationOptions,
    check_conflicts,
    used_by,
)
from vgr_trl.credit import active_rules, attention_weights, given_weights, shape_advantages
from vgr_trl.loss import entropy_penalty, perception_loss, surprisal
from vgr_trl.metrics import Totals, add_weights
from vgr_trl.options import FACTS, changed_options, check_options, option, unused_options
from vgr_trl.rewards.attention import compute_hard_negative_rewards, mdi_reward, vgr_reward
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass, vision_gain_ratio
from vgr_trl.utils import ConfigError, parse_yaml

OPTION_ALIASES = {
    "enable_token_weights": "token_weights",
    "token_weight_clip": "token_weights_clip",
    "token_weight_smooth_sigma": "token_weights_smooth_sigma",
    "token_weight_last_k_layers": "token_weights_last_k_layers",
    "token_weight_topk_ratio": "token_weights_topk_ratio",
    "positive_only": "token_weights_positive_only",
}
_AVAILABLE_SIGNALS = ("attention", "dependency", "entropies", "logps")  # to credit rules
_UNSUPPORTED_OPTIONS = {
    "compute_attention_metrics", "attention_source", "perturbation", "further_perturbations", "dependency_over",
    "patch_size", "noise_std", "blur_radius", "diffusion_steps", "crop_share", "mask_value", "perturb_per", "signals",
    "hidden_similarity_layer", "hidden_similarity_over",
}  # fmt: skip


@dataclass
class SignalOptions(MeasureOptions, PerturbationOptions, CreditOptions):
    """Options of measurement and credit assignment, and of these integrations."""

    # fmt: off
    estimator: str = option("grpo", "Advantage estimator of verl or EasyR1 to which credit is applied.")
    apply_to: Literal["advantages", "mask"] = option("advantages", "Whether token weights multiply advantages or the "
        "response mask.", needs="token_weights")
    collect_attentions: bool = option(False, "Use token weights from the rollout instead of measuring attention in the "
        "actor.", needs="token_weights")
    vgr_reward_weight: float = option(0.0, "Weight of the VGR reward.")
    hard_negative_reward_weight: float = option(0.0, "Weight of the VGR reward among right answers.")
    mdi_reward_weight: float = option(0.0, "Weight of the MDI reward.")
    mdi_balance_ratio: float = option(2.0, "VGR (or its inverse) at which the MDI balance is 0; above 1.", gt=1,
        needs="mdi_reward_weight")
    right_from: float = option(0.5, "Minimum reward of a right answer, for the hard negative reward.",
        needs="hard_negative_reward_weight")
    seed: int = option(42, "Seed of the perturbed images.", ge=0, needs=used_by())
    # fmt: on

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> "SignalOptions":
        """Read options from a mapping, by name or alias.

        Raises:
            ConfigError: an option is unknown, unsupported, given twice, out of range, or has no effect.
        """
        known = {each.name for each in fields(cls)} - _UNSUPPORTED_OPTIONS
        values: dict[str, Any] = {}
        for key, value in dict(given or {}).items():
            name = OPTION_ALIASES.get(key, key)
            if name not in known:
                accepted = ", ".join(sorted(known | set(OPTION_ALIASES)))
                raise ConfigError(f"The option {key} is unknown or unsupported here: give {accepted}.")
            if name in values:
                raise ConfigError(f"The option {name} is given twice, as {key} too: give it once.")
            if isinstance(value, str) and name == "token_weights_clip":
                value = parse_yaml(f"[{value.strip('()[] ')}]")  # (0.5,2.0) from a command line
            values[name] = list(value) if name == "token_weights_clip" else value
        options = cls(**values)
        options.check()
        return options

    def check(self) -> None:
        """Raise `ConfigError` for values out of range and options without effect."""
        check_options(self)
        self.check_plugins()
        check_conflicts(self, PERTURBATION_CONFLICTS)
        for need, readers in self.readers().items():
            if need not in _AVAILABLE_SIGNALS:
                raise ConfigError(
                    f"{readers[0]} reads {need}, which is not measured here: use one that reads only "
                    f"{', '.join(_AVAILABLE_SIGNALS)}."
                )
        absent = FACTS.keys() - ({"attention"} if self.measures_attention else set())
        for name, why in unused_options(self, absent).items():
            raise ConfigError(f"{name} is given, but {why}: remove it, or turn on the feature that uses it.")

    @property
    def rewards_attention(self) -> bool:
        """Whether an attention reward has a weight."""
        return any((self.vgr_reward_weight, self.hard_negative_reward_weight, self.mdi_reward_weight))

    @property
    def measures_attention(self) -> bool:
        """Whether attention is measured in the pass for old log-probabilities."""
        weighs = self.token_weights and not self.collect_attentions
        return weighs or self.rewards_attention or "attention" in self.readers()

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as input of `read`."""
        return {name: value for name, value in changed_options(self).items() if name not in _UNSUPPORTED_OPTIONS}


ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "vgr": {},
    "vgr_vppo": {"enable_perception_filtering": True, "enable_trajectory_reweighting": True},
    "vgr_token_weights": {"token_weights": True},
}
LOSSES = ("vgr", "vgr_vppo", "vgr_papo")  # verl's vanilla loss plus the enabled terms


def resolve_options(adv_estimator: str, given: Mapping[str, Any] | None, loss_mode: str | None = None) -> SignalOptions:
    """Return the options of a run: the given ones, over the defaults of the estimator.

    Args:
        adv_estimator: value in the configuration.
        given: options by name or alias.
        loss_mode: value in the configuration; None if the trainer has no registry of losses.

    Raises:
        ConfigError: an option is unknown, out of range, or has no effect.
    """
    stated = {OPTION_ALIASES.get(key, key) for key in given or ()}
    named = {name: value for name, value in ESTIMATORS.get(adv_estimator, {}).items() if name not in stated}
    options = SignalOptions.read(named | dict(given or {}))
    shapes = options.shapes_advantages or options.rewards_attention
    if shapes and adv_estimator not in ESTIMATORS:
        raise ConfigError(
            f"Options of this library change advantages, but adv_estimator is {adv_estimator!r}, which does not read "
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


COLUMNS = ("vgr_vision", "vgr_instruction", "vgr_token", "vgr_dependency")  # of a batch, (N, T) each


@dataclass
class SignalContext:
    """Signals for estimators and losses, in addition to the arguments of verl and EasyR1.

    Attributes:
        options: of the run.
        columns: name -> (N, T), of `COLUMNS`, `entropies` and `old_log_probs`, as available.
        token_weights: (N, T), if they came with the rollout.
        perturbed_logps: (N, T) with gradients, on perturbed images; None if no loss term needs them.
        metrics: set by the estimator, logged by the trainer.
        response_mask: set by the estimator if token weights are applied to the mask.
    """

    options: SignalOptions
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_weights: torch.Tensor | None = None
    perturbed_logps: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    response_mask: torch.Tensor | None = None

    def attention(self, mask: torch.Tensor, late: bool = False) -> AttentionMass | None:
        """Return attention per token as a mass of one layer; None if not measured.

        Args:
            mask: (N, T) bool.
            late: use the late layers, as rewards do; else those of token weights.
        """
        vision, instruction = self.columns.get("vgr_vision"), self.columns.get("vgr_instruction")
        if "vgr_token" in self.columns and not late:  # a ratio: the attention on the image is set to 1
            instruction = self.columns["vgr_token"]
            vision = torch.ones_like(instruction)
        if vision is None or instruction is None:
            return None
        one = torch.ones(len(mask), dtype=torch.long)
        return AttentionMass(vision.float()[None], instruction.float()[None], one, one, mask)

    def signals(self, mask: torch.Tensor) -> RolloutSignals:
        """Return the measurements as signals for credit rules; NaN if not measured.

        Args:
            mask: (N, T) bool.
        """
        unknown = torch.full(mask.shape, torch.nan)
        logps, entropies = (self.columns.get(name, unknown).float() for name in ("old_log_probs", "entropies"))
        dependency = self.columns.get("vgr_dependency")
        return RolloutSignals(
            logps, entropies, mask, self.attention(mask), None if dependency is None else dependency.float()
        )


_CONTEXT: ContextVar[SignalContext | None] = ContextVar("signal_context", default=None)


@contextmanager
def set_signal_context(context: SignalContext) -> Iterator[SignalContext]:
    """Make the signals of a batch available to estimators and losses in this block."""
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)


def get_signal_context(reader: str) -> SignalContext:
    """Return the signals of the current batch; `reader` is the estimator or loss, for the message.

    Raises:
        ConfigError: no signals are set.
    """
    if (context := _CONTEXT.get()) is None:
        raise ConfigError(
            f"{reader} got no signals: set the environment variable VERL_ENGINE_VENDOR=vgr and "
            "trainer.v1.trainer_mode=vgr_sync, whose engine and trainer provide them."
        )
    return context


def add_signal_rewards(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], context: SignalContext
) -> torch.Tensor:
    """Return the rewards (N, T) with attention rewards added to the last token of each completion.

    Undefined rewards add nothing and are counted. Rows without tokens, with which verl pads a batch, are ignored.

    Args:
        token_level_rewards: (N, T); its row sums are the rewards of the completions.
        response_mask: (N, T).
        index: (N,), equal for completions of one prompt, in any order.
        context: signals of the batch; metrics are added to it.

    Raises:
        ConfigError: attention was not measured.
    """
    options = context.options
    if not options.rewards_attention:
        return token_level_rewards
    mass = context.attention(response_mask.bool(), late=True)
    if mass is None:
        raise ConfigError("An attention reward has a weight, but the batch has no measured attention.")
    vgr, right = vision_gain_ratio(mass).tolist(), (token_level_rewards.sum(1) >= options.right_from).float().tolist()
    groups: dict[Any, list[int]] = {}
    for row in response_mask.any(1).nonzero().flatten().tolist():
        groups.setdefault(index[row], []).append(row)
    rewards, last = token_level_rewards.float().clone(), response_mask.long().cumsum(1).argmax(1)  # (N, T), (N,)
    for name, weight, reward in (
        ("vgr", options.vgr_reward_weight, lambda own, right: vgr_reward(own, own, len(own))),
        ("vgr_hard_negative", options.hard_negative_reward_weight,
         lambda own, right: compute_hard_negative_rewards(right, own, len(own))),
        ("mdi", options.mdi_reward_weight, lambda own, right: mdi_reward(own, own, options.mdi_balance_ratio)),
    ):  # fmt: skip
        if not weight:
            continue
        values = {
            row: value
            for group in groups.values()
            for row, value in zip(group, reward([vgr[r] for r in group], [right[r] for r in group]), strict=True)
        }
        defined = {row: value for row, value in values.items() if value is not None}
        for row, value in defined.items():
            rewards[row, last[row]] += weight * value
        if defined:
            context.metrics[f"rewards/{name}/mean"] = sum(defined.values()) / len(defined)
            context.metrics[f"rewards/{name}/not_applicable"] = len(values) - len(defined)
    return rewards


Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def make_estimator(name: str, find_base: Callable[[str], Estimator]) -> Estimator:
    """Return the advantage estimator to register under a name.

    Args:
        find_base: returns an estimator of verl or EasyR1 by name.
    """

    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, (N, T) each, with signals applied."""
        context = get_signal_context(f"The advantage estimator {name}")
        base = find_base(context.options.estimator)
        taken = inspect.signature(base).parameters
        if "norm_adv_by_std_in_grpo" in taken and more.get("config") is not None:
            more["norm_adv_by_std_in_grpo"] = more["config"].get("norm_adv_by_std_in_grpo", True)
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            more = {key: value for key, value in more.items() if key in taken}
        return estimate_advantages(
            base, context, token_level_rewards=token_level_rewards, response_mask=response_mask, index=index, **more
        )

    return estimator


def estimate_advantages(
    base: Estimator,
    context: SignalContext,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages per token and returns: of `base`, on rewards with signals, with credit rules applied.

    Args:
        context: signals of the batch; metrics are added to it.
        token_level_rewards: (N, T).
        response_mask: (N, T).
        index: (N,), equal for completions of one prompt.

    Raises:
        ConfigError: a rule or reward needs a signal that was not measured.
    """
    rewards = add_signal_rewards(token_level_rewards, response_mask, index, context)
    advantages, returns = base(token_level_rewards=rewards, response_mask=response_mask, index=index, **more)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(index))}
    prompts = torch.tensor([numbers[key] for key in index])  # (N,)
    nonzero = ((advantages * response_mask) != 0).any(1)
    varied = torch.isin(prompts, prompts[nonzero])  # prompts whose advantages are not all 0
    return shape_credit(advantages, response_mask, context, varied, prompts), returns


def shape_credit(
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    context: SignalContext,
    shaped: torch.Tensor | None = None,
    prompts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return advantages (N, T) multiplied by the token factors of the enabled rules.

    With `apply_to` mask, token weights instead multiply the mask and are returned in `context.response_mask`.

    Args:
        advantages: (N, T).
        response_mask: (N, T).
        context: signals of the same batch; metrics are added to it.
        shaped: (N,) bool, completions included in the statistics of the trajectory scale; None: all.
        prompts: (N,) prompt indices, for rules that compare completions; None: one prompt.
    """
    options, mask = context.options, response_mask.bool()
    credit = advantages.float() * mask
    others = replace(options, token_weights=False, credit_rules=options.plugin_rules)
    if rules := active_rules(others):
        if any("entropies" in needs for needs in rules.values()) and "entropies" not in context.columns:
            raise ConfigError("A rule reads entropies, which this trainer does not compute: turn it off.")
        credit, metrics = shape_advantages(credit, context.signals(mask), others, shaped=shaped, groups=prompts)
        context.metrics |= {f"vgr/{name}": value for name, value in metrics.items()}
    if options.token_weights:
        weights = _compute_token_weights(context, mask)
        if options.token_weights_positive_only:
            weights = weights.masked_fill(advantages < 0, 1)
        add_weights(totals := Totals(), "vgr/token_weight", weights, mask)
        context.metrics |= totals.metrics()
        if options.apply_to == "mask":
            context.response_mask = response_mask * weights
        else:
            credit = credit * weights
    return credit * mask


def _compute_token_weights(context: SignalContext, mask: torch.Tensor) -> torch.Tensor:
    """Return weights (N, T) of mean 1 per completion: from the rollout, else from measured attention, else 1."""
    if (weights := context.token_weights) is not None:
        return given_weights(weights, mask, torch.ones(mask.shape, device=mask.device))
    if (mass := context.attention(mask)) is not None:  # already restricted to the chosen layers
        return attention_weights(mass, mask, replace(context.options, token_weights_last_k_layers=None))
    warnings.warn(
        "enable_token_weights is on, but the batch has neither token_weights nor measured attention: all weights are 1 "
        "(logged once).",
        stacklevel=3,
    )
    return torch.ones(mask.shape)


Loss = tuple[torch.Tensor, dict[str, Any]]


def add_loss_terms(base: Callable[..., Loss], aggregate: Callable[..., torch.Tensor], name: str) -> Callable[..., Loss]:
    """Return a policy loss of verl: `base` plus the enabled terms, with the same aggregation.

    Args:
        aggregate: verl's `agg_loss`.
        name: registered name, for messages.
    """

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> Loss:
        context = get_signal_context(f"The policy loss {name}")
        how = {"loss_agg_mode": loss_agg_mode, "config": config, "rollout_is_weights": rollout_is_weights}
        value, metrics = base(
            old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask, **how
        )
        for term, per_token in compute_loss_terms(context, log_prob, response_mask).items():
            share = aggregate(
                loss_mat=per_token, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
            )
            value = value + share
            metrics[f"actor/{term}"] = share.detach().item()
        return value, metrics

    return loss


def compute_loss_terms(context: SignalContext, logps: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the enabled loss terms, (N, T) each, 0 outside the mask.

    Args:
        logps: (N, T) with gradients.
        mask: (N, T).

    Raises:
        ConfigError: the perception loss is on, but there are no log-probabilities on perturbed images.
    """
    options, mask = context.options, mask.bool()
    terms = {}
    if options.use_entropy_penalty:
        terms["entropy_penalty"] = entropy_penalty(logps, mask, options.entropy_penalty_coef)
    if options.uses_perception_loss:
        if context.perturbed_logps is None:
            raise ConfigError("The perception loss needs perturbed images, but the micro-batch has none: add images.")
        terms["perception_loss"] = perception_loss(
            logps,
            context.perturbed_logps,
            mask,
            coefficient=options.perception_loss_weight,
            entropy_coefficient=options.der_loss_weight1,
            perturbed_entropy_coefficient=options.der_loss_weight2,
        )
    elif options.der_loss_weight1 > 0:
        terms["entropy_loss"] = options.der_loss_weight1 * surprisal(logps, mask)
    return terms
