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
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vgr_trl.config import (
    PERTURBATION_CONFLICTS,
    LossOptions,
    MeasureOptions,
    check_conflicts,
    used_by,
)
from vgr_trl.config_converters import EASYR1_KEYS
from vgr_trl.credit import active_rules, given_weights, shape_advantages, weigh_tokens
from vgr_trl.errors import ConfigError, RewardError
from vgr_trl.loss.terms import TermInputs
from vgr_trl.metrics.step_metrics import Totals, add_weights
from vgr_trl.options import FACTS, check_options, option, unused_options
from vgr_trl.recipes import parse_yaml
from vgr_trl.registries import loss_terms
from vgr_trl.rewards.functions import (
    accuracy_reward,
    compute_hard_negative_rewards,
    get_soft_overlong_punishment,
    mdi_reward,
    think_format_reward,
    vgr_reward,
)
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass, vision_gain_ratio

_WEIGHTS = {key: row.option for key, row in EASYR1_KEYS.items() if str(row.option).startswith("token_weights")}
OPTION_ALIASES = {key.removeprefix("algorithm."): str(option) for key, option in _WEIGHTS.items()}  # EasyR1's ports
_AVAILABLE_SIGNALS = ("attention", "dependency", "entropies", "logps")  # to credit rules
_UNSUPPORTED_OPTIONS = {
    "compute_attention_metrics", "attention_source", "attention_rows", "check_pixels", "engine_distance_limit",
    "perturbation", "further_perturbations", "dependency_over", "patch_size", "noise_std", "blur_radius",
    "diffusion_steps", "crop_share", "mask_value", "perturb_per", "signals", "hidden_similarity_layer",
    "hidden_similarity_over", "loss_terms", "teacher_view",
}  # fmt: skip


@dataclass
class SignalOptions(MeasureOptions, LossOptions):
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
    right_from: float = option(0.5, "Minimum reward of a right answer, for the hard negative reward.",
        needs="hard_negative_reward_weight")
    seed: int = option(42, "Seed of the perturbed images.", ge=0, needs=used_by())
    # fmt: on

    @classmethod
    def read(cls, stated: Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None) -> "SignalOptions":
        """Read options from a mapping, by name or alias.

        Raises:
            ConfigError: an option is unknown, unsupported, given twice, out of range, or has no effect.
        """
        accepted_names = {field.name for field in fields(cls)} - _UNSUPPORTED_OPTIONS
        values: dict[str, Any] = {}
        for key, value in (stated or {}).items():
            name = OPTION_ALIASES.get(key, key)
            if name not in accepted_names:
                accepted = ", ".join(sorted(accepted_names | set(OPTION_ALIASES)))
                raise ConfigError(f"The option {key} is unknown or unsupported here: give {accepted}.")
            if name in values:
                raise ConfigError(f"The option {name} is given twice, as {key} too: give it once.")
            if name == "token_weights_clip":  # (0.5,2.0) from a command line
                value = parse_yaml(f"[{value.strip('()[] ')}]") if isinstance(value, str) else list(value)
            values[name] = value
        options = cls(**{**(defaults or {}), **values})
        check_options(options)
        options.check_plugins()
        check_conflicts(options, PERTURBATION_CONFLICTS)
        for need, readers in options.readers().items():
            if need not in _AVAILABLE_SIGNALS:
                raise ConfigError(f"{readers[0]} reads {need}, which is not measured here: use another one.")
        absent = FACTS.keys() - ({"attention"} if options.measures_attention else set())
        for name, why in unused_options(options, absent).items():
            raise ConfigError(f"{name} is given, but {why}: remove it, or turn on the feature that uses it.")
        return options

    @property
    def rewards_attention(self) -> bool:
        """Return whether an attention reward has a weight."""
        return any((self.vgr_reward_weight, self.hard_negative_reward_weight, self.mdi_reward_weight))

    @property
    def measures_attention(self) -> bool:
        """Return whether attention is measured in the pass for old log-probabilities."""
        weighs = self.token_weights and not self.collect_attentions
        return weighs or self.rewards_attention or "attention" in self.readers()


ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "vgr": {},
    "vgr_vppo": {"enable_perception_filtering": True, "enable_trajectory_reweighting": True},
    "vgr_token_weights": {"token_weights": True},
}
LOSSES = ("vgr", "vgr_vppo", "vgr_papo")  # verl's vanilla loss plus the enabled terms


def resolve_options(estimator: str, stated: Mapping[str, Any] | None, loss_mode: str | None = None) -> SignalOptions:
    """Return the options of a run: the given values over the defaults of the estimator.

    Args:
        estimator: `adv_estimator` in the configuration.
        stated: options by name or alias.
        loss_mode: value in the configuration; None if the trainer has no registry of losses.

    Raises:
        ConfigError: an option is unknown, out of range, or has no effect.
    """
    options = SignalOptions.read(stated, ESTIMATORS.get(estimator))
    if estimator not in ESTIMATORS and (options.shapes_advantages or options.rewards_attention):
        raise ConfigError(f"adv_estimator {estimator!r} does not read the options: use {', '.join(ESTIMATORS)}.")
    if options.terms and loss_mode not in (*LOSSES, None):
        raise ConfigError(f"loss_mode {loss_mode!r} does not read the options given: use {', '.join(LOSSES)}.")
    if loss_mode == "vgr_papo" and not options.uses_perception_loss:
        raise ConfigError("loss_mode is vgr_papo, but perception_loss_weight is 0: give it a weight, such as 0.01.")
    return options


COLUMNS = ("vgr_vision", "vgr_instruction", "vgr_token", "vgr_dependency")  # columns of a batch, (N, T) each


@dataclass
class SignalContext:
    """Signals for estimators and losses, in addition to the arguments of verl and EasyR1.

    Attributes:
        options: options of the run.
        columns: name -> (N, T), of `COLUMNS`, `entropies` and `old_log_probs`, as available.
        token_weights: (N, T), if they came with the rollout.
        perturbed_logps: (N, T) with gradients, on perturbed images; None if no loss term needs them.
        metrics: set by the estimator, logged by the trainer.
        response_mask: set by the estimator if token weights are applied to the mask.
    """

    options: SignalOptions
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    token_weights: Tensor | None = None
    perturbed_logps: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    response_mask: Tensor | None = None

    def signals(self, mask: Tensor) -> RolloutSignals:
        """Return the measurements as signals for credit rules, NaN where nothing was measured.

        Args:
            mask: (N, T) bool.
        """
        columns = {name: column.float() for name, column in self.columns.items()}
        unknown, attention = torch.full(mask.shape, torch.nan), None
        if "vgr_vision" in columns:  # means per token of the late layers, as the mass of one layer
            ones = torch.ones(len(mask), dtype=torch.long)
            attention = AttentionMass(columns["vgr_vision"][None], columns["vgr_instruction"][None], ones, ones, mask)
        logps, entropies = (columns.get(name, unknown) for name in ("old_log_probs", "entropies"))
        return RolloutSignals(logps, entropies, mask, attention, columns.get("vgr_dependency"))


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
    """Return the signals of the current batch.

    Args:
        reader: the estimator or loss, for the message.

    Raises:
        ConfigError: no signals are set.
    """
    if (context := _CONTEXT.get()) is None:
        raise ConfigError(f"{reader} got no signals: set VERL_ENGINE_VENDOR=vgr and trainer.v1.trainer_mode=vgr_sync.")
    return context


def add_signal_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], context: SignalContext
) -> Tensor:
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
    options, mass = context.options, context.signals(response_mask.bool()).attention
    if not options.rewards_attention:
        return token_level_rewards
    if mass is None:
        raise ConfigError("An attention reward has a weight, but the batch has no measured attention.")
    vgr, right = vision_gain_ratio(mass).tolist(), (token_level_rewards.sum(1) >= options.right_from).float().tolist()
    groups: dict[Any, list[int]] = {}
    for row in response_mask.any(1).nonzero().flatten().tolist():
        groups.setdefault(index[row], []).append(row)
    rewards, last = token_level_rewards.float().clone(), response_mask.long().cumsum(1).argmax(1)  # (N, T), (N,)
    for name, weight, reward in (
        ("vgr", options.vgr_reward_weight, lambda vgr, right: vgr_reward(vgr, vgr, len(vgr))),
        ("vgr_hard_negative", options.hard_negative_reward_weight,
         lambda vgr, right: compute_hard_negative_rewards(right, vgr, len(vgr))),
        ("mdi", options.mdi_reward_weight, lambda vgr, right: mdi_reward(vgr, vgr, options.mdi_balance_ratio)),
    ):  # fmt: skip
        if not weight:
            continue
        applied: dict[int, float] = {}
        for rows in groups.values():
            values = reward([vgr[row] for row in rows], [right[row] for row in rows])
            applied |= {row: value for row, value in zip(rows, values, strict=True) if value is not None}
        for row, value in applied.items():
            rewards[row, last[row]] += weight * value
        if applied:
            context.metrics[f"rewards/{name}/mean"] = fmean(applied.values())
            context.metrics[f"rewards/{name}/not_applicable"] = sum(map(len, groups.values())) - len(applied)
    return rewards


Estimator = Callable[..., tuple[Tensor, Tensor]]


def make_estimator(name: str, find_base: Callable[[str], Estimator]) -> Estimator:
    """Return the advantage estimator to register under a name.

    Args:
        find_base: returns an estimator of verl or EasyR1 by name.
    """

    def estimator(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, (N, T) each: rewards with signals, the base, then credit rules.

        Args:
            token_level_rewards: (N, T).
            response_mask: (N, T).
            index: (N,), equal for completions of one prompt.

        Raises:
            ConfigError: no signals are set, or a rule or reward needs one that was not measured.
        """
        context = get_signal_context(f"The advantage estimator {name}")
        base = find_base(context.options.estimator)
        taken = inspect.signature(base).parameters
        if "norm_adv_by_std_in_grpo" in taken and more.get("config") is not None:
            more["norm_adv_by_std_in_grpo"] = more["config"].get("norm_adv_by_std_in_grpo", True)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
            more = {key: value for key, value in more.items() if key in taken}
        rewards = add_signal_rewards(token_level_rewards, response_mask, index, context)
        advantages, returns = base(token_level_rewards=rewards, response_mask=response_mask, index=index, **more)
        prompts = torch.from_numpy(np.unique(index, return_inverse=True)[1])  # (N,)
        varied = torch.isin(prompts, prompts[((advantages * response_mask) != 0).any(1)])  # advantages are not all 0
        return shape_credit(advantages, response_mask, context, varied, prompts), returns

    return estimator


def shape_credit(
    advantages: Tensor,
    response_mask: Tensor,
    context: SignalContext,
    shaped: Tensor | None = None,
    prompts: Tensor | None = None,
) -> Tensor:
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
    rules_alone = replace(options, token_weights=False, credit_rules=options.plugin_rules)
    if active_rules(rules_alone):
        credit, metrics = shape_advantages(credit, context.signals(mask), rules_alone, shaped=shaped, groups=prompts)
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


def _compute_token_weights(context: SignalContext, mask: Tensor) -> Tensor:
    """Return weights (N, T) of mean 1 per completion: from the rollout, else from measured attention, else 1."""
    options, ones = context.options, torch.ones(mask.shape, device=mask.device)
    if context.token_weights is not None:
        return given_weights(context.token_weights, mask, ones)
    if "vgr_token" in context.columns:
        return weigh_tokens(context.columns["vgr_token"].float(), mask, options)
    warnings.warn("The batch has neither token_weights nor measured attention: all weights are 1.", stacklevel=3)
    return ones


Loss = tuple[Tensor, dict[str, Any]]


def add_loss_terms(base: Callable[..., Loss], aggregate: Callable[..., Tensor], name: str) -> Callable[..., Loss]:
    """Return a policy loss of verl: `base` plus the enabled terms, with the same aggregation.

    Args:
        aggregate: verl's `agg_loss`.
        name: registered name, for messages.
    """

    def loss(*, log_prob: Tensor, response_mask: Tensor, loss_agg_mode: str, config: Any, **further: Any) -> Loss:
        context = get_signal_context(f"The policy loss {name}")
        arguments = {"response_mask": response_mask, "loss_agg_mode": loss_agg_mode, "config": config}
        value, metrics = base(log_prob=log_prob, **arguments, **further)
        mean = partial(aggregate, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
        terms, of_terms = sum_loss_terms(context, log_prob, response_mask, mean)
        return value + terms, metrics | {f"actor/{term}": share for term, share in of_terms.items()}

    return loss


def sum_loss_terms(
    context: SignalContext, logps: Tensor, mask: Tensor, average: Callable[[Tensor], Tensor]
) -> tuple[Tensor | float, dict[str, float]]:
    """Return the sum of the enabled loss terms, with gradients, and each by name.

    Args:
        context: options, and log-probabilities on perturbed images.
        logps: (N, T) with gradients.
        mask: (N, T).
        average: averages a term (N, T), 0 outside the mask, as the trainer averages its loss.
    """
    inputs = TermInputs(logps, mask.bool(), perturbed_logps=context.perturbed_logps)
    terms = {name: average(loss_terms.load(name)(inputs, context.options)) for name in context.options.terms}
    return sum(terms.values()), {name: term.detach().item() for name, term in terms.items()}


REWARD_NAME, REWARD_TYPE = "vgr", "batch"  # read by EasyR1


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    accuracy_weight: float = 1.0,
    format_weight: float = 0.0,
    length_weight: float = 0.0,
    max_completion_len: int | None = None,
    soft_punish_cache: int | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, float]:
    """Return accuracy, format and length, and their weighted sum as `score`.

    Accuracy is 1 for a right answer, else 0, also if the ground truth cannot be resolved. Format is 1 for a thought
    followed by an answer. Length is the soft overlong punishment.

    Args:
        data_source: source of the row; not used.
        solution_str: the completion.
        ground_truth: a `solution` of `accuracy_reward`.
        extra_info: further columns of the row; `choices` and `response_length` are used.
        accuracy_weight, format_weight, length_weight: weights of the rewards.
        max_completion_len, soft_punish_cache: sizes of the length reward, in tokens.
        reward_router_address, reward_model_tokenizer: passed by verl's reward managers; not used.

    Raises:
        RewardError: the length reward has a weight, but an argument that it needs is missing.
    """
    info = extra_info or {}
    choices = info.get("choices")
    accuracy = accuracy_reward([solution_str], [ground_truth], None if choices is None else [list(choices)])[0] or 0.0
    score = {"accuracy": accuracy, "format": think_format_reward([solution_str])[0]}
    total = accuracy_weight * score["accuracy"] + format_weight * score["format"]
    if length_weight:
        if max_completion_len is None or soft_punish_cache is None or "response_length" not in info:
            raise RewardError("Length needs max_completion_len, soft_punish_cache, and response_length in extra_info.")
        punishment = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
        score["length"] = punishment([range(int(info["response_length"]))])[0]
        total += length_weight * score["length"]
    return {"score": total, **score}


def compute_scores(reward_inputs: Sequence[Mapping[str, Any]], **weights: Any) -> list[dict[str, float]]:
    """Return `overall`, `accuracy`, `format` (and `length`) of each completion.

    Args:
        reward_inputs: per completion `response`, `response_length` and `ground_truth`.
        weights: keyword arguments of `compute_score`.
    """
    scores = []
    for completion in reward_inputs:
        score = compute_score("", completion["response"], completion["ground_truth"], completion, **weights)
        scores.append({"overall": score.pop("score"), **score})
    return scores
