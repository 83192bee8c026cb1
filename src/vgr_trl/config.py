"""The options of each stage, in the order of data; `help` is their description."""

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from vgr_trl import registries
from vgr_trl.options import (
    Fraction,
    Natural,
    Positive,
    PositiveInt,
    Share,
    Switch,
    Weight,
    at_least,
    check_choice,
    check_fraction,
    check_interval,
    check_list,
    check_number,
    each,
    in_range,
    is_number,
    one_of,
    option,
)
from vgr_trl.registries import VIEW, Registry, needs_of, option_class, option_values, short_name
from vgr_trl.utils import ConfigError

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig


__all__ = [
    "AliasOptions",
    "BlindOptions",
    "CreditOptions",
    "CriticOptions",
    "DAPOConfig",
    "EfficiencyOptions",
    "EvaluateOptions",
    "GroupOptions",
    "KLOptions",
    "MeasureOptions",
    "NoisyOptions",
    "PerturbationOptions",
    "PluginOptions",
    "ReportOptions",
]


# ---------------------------------------------------------------------------------------------------------------------
# Other names of options, those of our users' scripts, in one place.


ALIASES = {
    "eval_num_generations": "num_generations_eval",
    "prompt_preview_chars": "prompt_preview_length",
    "completion_preview_chars": "completion_preview_length",
    "out_dir": "output_dir",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_dual": "delta",
    "late_reward_weights": "reward_weights",
}
LOSS_AVERAGES = {"token": "dapo", "sequence": "grpo", "seq": "grpo"}  # of `loss_avg_mode` -> `loss_type`


@dataclass
class AliasOptions:
    """Each option means the one that `ALIASES` names, and `loss_avg_mode` one of two loss types; None: that one is left
    as it is."""

    eval_num_generations: int | None = option(None, "Alias of num_generations_eval.")
    prompt_preview_chars: int | None = option(None, "Alias of prompt_preview_length.")
    completion_preview_chars: int | None = option(None, "Alias of completion_preview_length.")
    out_dir: str | None = option(None, "Alias of output_dir.")
    clip_ratio_low: float | None = option(None, "Alias of epsilon.")
    clip_ratio_high: float | None = option(None, "Alias of epsilon_high.")
    clip_ratio_dual: float | None = option(
        None, "Alias of delta: largest ratio of a token with negative advantage (dual clip), often 3.0."
    )
    loss_avg_mode: str | None = option(
        None, "token: loss_type dapo, the mean over all tokens; sequence (or seq): loss_type grpo."
    )
    late_reward_weights: list[float] | None = option(None, "Alias of reward_weights.")
    use_segmented_reward_weights: bool = option(
        False, "Of no effect: early_reward_weights hold at first wherever they are given."
    )

    def resolve_aliases(self) -> None:
        """Set the options that aliases stand for, or raise `ConfigError` where both are given and differ."""
        options: dict[str, Any] = type(self).__dataclass_fields__
        for alias, name in ALIASES.items():
            given, before = getattr(self, alias), getattr(self, name)
            if given is None:
                continue
            if before not in (given, options[name].default):
                raise ConfigError(
                    f"{alias} is {given} and {name}, of which it is an alias, is {before}: give one of them, or the "
                    "same value twice."
                )
            setattr(self, name, given)
        if self.loss_avg_mode is not None:
            self._resolve_loss_average(self.loss_avg_mode)
        if self.use_segmented_reward_weights and getattr(self, "early_reward_weights", None) is None:
            raise ConfigError(
                "use_segmented_reward_weights is given without weights for the beginning: add early_reward_weights, or "
                "leave it out."
            )

    def _resolve_loss_average(self, mode: str) -> None:
        check_choice("loss_avg_mode", mode, tuple(LOSS_AVERAGES))
        options: dict[str, Any] = type(self).__dataclass_fields__
        given = getattr(self, "loss_type", None)
        if given not in (LOSS_AVERAGES[mode], options["loss_type"].default):
            raise ConfigError(
                f"loss_avg_mode is {mode}, which means loss_type {LOSS_AVERAGES[mode]}, and loss_type is {given}: give "
                "one of them."
            )
        self.loss_type = LOSS_AVERAGES[mode]


# ---------------------------------------------------------------------------------------------------------------------
# Options that name plug-ins, and the options that plug-ins have themselves.


RULES: Mapping[str, Mapping[str, Any]] = {  # name of a rule of this library -> the options that switch it on
    "token_weights": {"token_weights": True},
    "perception_filter": {"enable_perception_filtering": True, "perception_weighting": "filter"},
    "perception_weights": {"enable_perception_filtering": True, "perception_weighting": "soft"},
    "entropy_filter": {"enable_entropy_filtering": True},
    "trajectory_scale": {"enable_trajectory_reweighting": True},
}
REMOVE_IMAGE = "remove_image"  # the only one that changes the prompt, not the image
PERTURBATIONS = (  # of this library
    "blacken_patches", "add_gaussian_noise", "gaussian_blur", "mask_image", "shuffle_patches", "crop_image",
    "diffusion_noise",
    REMOVE_IMAGE,
)  # fmt: skip


@dataclass
class PluginOptions:
    """What is added from outside; docs/extending.md says how."""

    credit_rules: list[str] | None = option(
        None,
        f"Rules that give tokens their credit: {', '.join(RULES)}; vgpo, pgpo, vepo, anchor_tokens "
        "(docs/recipes.md); those of installed packages, dotted paths or files (my_rules.py:my_rule).",
    )
    signals: list[str] | None = option(
        None,
        "Signals per token that are measured, logged and given to rewards: names, dotted paths or files "
        "(my_signals.py:my_signal).",
    )
    plugin_options: dict[str, Any] | str | None = option(
        None, "Options of plug-ins as JSON, where they are not given as flags of their own."
    )

    @property
    def plugin_rules(self) -> list[str]:
        """Those of `credit_rules` that are not of this library."""
        return [name for name in self.credit_rules or () if name not in RULES]

    def take_plugin_options(self, values: Mapping[str, Any]) -> None:
        """Add those of the values that options of the named plug-ins have."""
        known = self._known_options()
        self.plugin_options = self._given() | {name: value for name, value in values.items() if name in known}

    def plugin_values(self, plugin: Any, shown: str) -> Any:
        """Return the values of a plug-in's own options, all options of the run if it has none.

        Args:
            shown: its name for messages.
        """
        options = option_class(plugin, shown)
        return self if options is None else option_values(options, self._given())

    def readers(self) -> dict[str, list[str]]:
        """Return what plug-ins read of a rollout: measurement -> the signals and rules that need it.

        Raises:
            ConfigError: one of them, or what it reads, is not found.
        """
        found: dict[str, list[str]] = {}
        for name in self.signals or ():
            for need in registries.measurements([name]):
                found.setdefault(need, []).append(f"the signal {name}")
        for name in self.plugin_rules:
            for need in registries.measurements(needs_of(registries.credit_rules.load(name))):
                found.setdefault(need, []).append(f"the credit rule {name}")
        return found

    def _given(self) -> dict[str, Any]:
        given = self.plugin_options
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"plugin_options is {self.plugin_options!r}, which is no JSON ({error}).") from error
        if not isinstance(given, dict | None):
            raise ConfigError(f"plugin_options is {given!r}: give a JSON object of names and values.")
        return given or {}

    def _plugins(self) -> Iterator[tuple[Registry, str]]:
        yield from ((registries.credit_rules, name) for name in self.plugin_rules)
        yield from ((registries.signals, name) for name in self.signals or ())
        for name in dict.fromkeys([*getattr(self, "views", ()), *getattr(self, "noisy_perturbations", ())]):
            if name not in PERTURBATIONS:
                yield registries.perturbations, name

    def _known_options(self) -> set[str]:
        classes = [option_class(registry.load(name), name) for registry, name in self._plugins()]
        return {each.name for options in classes if options is not None for each in fields(options)}

    def check_plugins(self) -> None:
        """Switch the named rules of this library on; raise `ConfigError` for plug-ins that cannot be used."""
        self._switch_on()
        known = self._known_options()
        for registry, name in self._plugins():
            self.plugin_values(registry.load(name), name)
        for name in self._given():
            if name not in known:
                raise ConfigError(
                    f"plugin_options has {name!r}, which no plug-in that is named has: give "
                    f"{', '.join(sorted(known)) or 'none, as they have no options'}; a reward's options are given to "
                    "vgr_trl.rewards.load_reward."
                )
        for kind in ("credit_rules", "signals"):
            names = [short_name(name) for name in getattr(self, kind) or ()]
            if len(set(names)) < len(names):
                raise ConfigError(f"{kind} is {getattr(self, kind)}, two of which have one name: rename one.")
        self.readers()

    def _switch_on(self) -> None:
        named = [name for name in self.credit_rules or () if name in RULES]
        if {"perception_filter", "perception_weights"} <= set(named):
            raise ConfigError("credit_rules has perception_filter and perception_weights: give one of them.")
        for switch, value in (pair for name in named for pair in RULES[name].items()):
            if hasattr(self, switch):
                setattr(self, switch, value)


# ---------------------------------------------------------------------------------------------------------------------
# Options of blind answers: questions answered again from what a completion says of the image.


BLIND_PROMPT = (
    "This is what was written about an image that you cannot see:\n{description}\n\nQuestion: {question}\n\nAnswer the "
    "question from this description alone. Write your reasoning between <think> and </think>, then only the final "
    "answer between <answer> and </answer>. For a multiple-choice question the final answer is the letter of the right "
    "option."
)


@dataclass
class BlindOptions:
    """How a question is asked again without its image (Vision-SR1, https://huggingface.co/papers/2508.19652)."""

    blind_tag: str = option(
        "description", "Tag of a completion between which it describes the image, for blind answers."
    )
    blind_without_tag: Annotated[str, one_of("wrong", "completion")] = option(
        "wrong",
        "Blind answers of completions without a description: wrong, or from the whole completion, as published.",
    )
    blind_prompt: str = option(
        BLIND_PROMPT, "What is asked for a blind answer, a text with {description} and {question}."
    )

    def check_blind(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        if not isinstance(self.blind_tag, str) or not re.fullmatch(r"\w+", self.blind_tag):
            raise ConfigError(f"blind_tag is {self.blind_tag!r}: give the name of a tag, such as description.")
        for name in ("{description}", "{question}"):
            if name not in str(self.blind_prompt):
                raise ConfigError(f"blind_prompt has no {name}: put it where that is to stand.")


# ---------------------------------------------------------------------------------------------------------------------
# Options of the advantages, and of the groups that are trained on.


ESTIMATORS = ("grpo", "rloo", "remax", "reinforce_plus_plus", "grpo_passk", "gae")


@dataclass
class GroupOptions:
    """How completions of a prompt are compared, and what happens to groups without a gradient (dead groups)."""

    advantage_estimator: Annotated[str, one_of(*ESTIMATORS)] = option(
        "grpo", f"How completions of a prompt are compared: {', '.join(ESTIMATORS)}."
    )
    replay_buffer_size: Natural = option(0, "Groups kept to replace groups without a gradient; 0: none.")
    replay_var_epsilon: Weight = option(
        1e-6, "Largest |advantage| (grpo: standard deviation of the rewards) of a group without a gradient."
    )
    filter_min_reward: Annotated[float | None, in_range(-1e30, 1e30, "that is finite")] = option(
        None, "Mean reward that a group needs to enter the replay buffer. None: any."
    )
    replay_max_age: Annotated[int | None, at_least(1)] = option(
        None, "Steps after which a group leaves the replay buffer. None: never."
    )
    dynamic_sampling: Annotated[str | None, one_of(None, "resample")] = option(
        None, "resample: draw further prompts while groups have no gradient. None: do not."
    )
    dynamic_sampling_max_rounds: PositiveInt = option(3, "How often further prompts are drawn for a batch, at most.")
    online_filtering: Switch = option(
        False, "Drop groups whose mean of filter_key lies outside (filter_low, filter_high)."
    )
    filter_key: str = option(
        "accuracy",
        "Reward function, or a part of its name (accuracy for accuracy_reward), whose unweighted values online "
        "filtering looks at; or overall, the weighted sum of all.",
    )
    filter_mode: Annotated[str, one_of("bounds", "quantile")] = option(
        "bounds", "bounds: filter_low and filter_high are values of filter_key; quantile: of the rollout's groups."
    )
    filter_low: float = option(0.01, "Lower bound of online filtering, exclusive; or quantile, inclusive.")
    filter_high: float = option(0.99, "Upper bound of online filtering; the default fits rewards from 0 to 1.")

    @property
    def selects_groups(self) -> bool:
        """Whether groups can be replaced."""
        return self.replay_buffer_size > 0 or self.dynamic_sampling is not None or self.online_filtering

    def check_choose(self) -> None:
        """Raise `ConfigError` for bounds out of range, and for groups that could not be replaced."""
        if self.filter_mode == "quantile":
            check_number("filter_low", self.filter_low, 0, 1, "in [0, 1], a quantile")
            check_number("filter_high", self.filter_high, 0, 1, "in [0, 1], a quantile")
        if self.advantage_estimator == "gae" and self.replay_buffer_size > 0:
            raise ConfigError(
                f"advantage_estimator is gae with replay_buffer_size {self.replay_buffer_size}, whose groups would "
                "keep advantages of an earlier critic: drop the buffer, or use another estimator."
            )
        if not (is_number(self.filter_low) and is_number(self.filter_high) and self.filter_low < self.filter_high):
            raise ConfigError(
                f"filter_low is {self.filter_low!r} and filter_high is {self.filter_high!r}: give two numbers with "
                "filter_low < filter_high."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Options of the credit that each token gets.


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


# ---------------------------------------------------------------------------------------------------------------------
# Options of the critic, whose values are what `advantage_estimator gae` compares with.


LEARNING_RATES = {"head": 1e-3, "model": 1e-5}


@dataclass
class CriticOptions:
    """How the values of tokens are learned and what becomes of them."""

    gamma: Share = option(1.0, "Discount of advantage_estimator gae, in [0, 1].")
    lam: Share = option(1.0, "Lambda of advantage_estimator gae, in [0, 1].")
    critic: Annotated[str, one_of(*LEARNING_RATES)] = option(
        "head",
        "head: on the policy's last hidden states, which it does not train; model: a copy of the policy with a scalar "
        "head, of which those parameters are trained that the policy trains.",
    )
    critic_learning_rate: Annotated[float | None, in_range(1e-30, 1e30, "above 0")] = option(
        None, "Learning rate of the critic. None: 1e-3 for a head, 1e-5 for a model."
    )
    critic_warmup_steps: Natural = option(0, "Steps over which the critic's learning rate rises from 0.")
    critic_warmup: Natural = option(0, "Steps in the beginning in which only the critic is trained.")
    cliprange_value: Positive = option(
        0.5, "How far a value may move from that of the rollout before its loss stops following."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Options of the evaluations of a run.


@dataclass
class EvaluateOptions:
    """How completions are sampled in evaluations, where that differs from training.

    Log-probabilities are those of `temperature` all the same.
    """

    eval_temperature: Annotated[float | None, in_range(0, 1e30, "of at least 0")] = option(
        None, "Sampling temperature in evaluations, 0: greedy. None: temperature."
    )
    eval_top_p: Annotated[float | None, in_range(1e-9, 1, "in (0, 1]")] = option(
        None, "top_p in evaluations, in (0, 1]. None: top_p."
    )

    def check_evaluate(self) -> None:
        """Raise `ConfigError` where the completions of a prompt would be alike."""
        every = [getattr(self, name, None) for name in ("num_generations_eval", "num_generations")]
        completions = next((count for count in every if count), 1)
        if self.eval_temperature == 0 and completions > 1:
            raise ConfigError(
                f"eval_temperature is 0 with {completions} completions per prompt in evaluations, which would be "
                "alike: give num_generations_eval 1."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Options of the KL divergence of the policy from its reference.


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


# ---------------------------------------------------------------------------------------------------------------------
# Options of the measurement of attention, and of the rewards made of it.


@dataclass
class MeasureOptions(PluginOptions):
    """How much attention the generated tokens pay to the image and to the instruction."""

    compute_attention_metrics: bool | None = option(
        None,
        "Log how attention is shared between image and instruction (VGR, AEI, MDI balance, by segment of layers). "
        "None: wherever it can be.",
    )
    attention_source: Annotated[str, one_of("scoring", "generate")] = option(
        "scoring",
        "scoring: attention is measured in one pass without gradients per rollout batch, with any kernel and any "
        "generation backend; generate: while transformers generates, with eager attention.",
    )
    attention_segments: Annotated[str, one_of("thirds", "ends")] = option(
        "thirds", "thirds: early, middle and late thirds of the layers; ends: first, middle and last two."
    )
    vision_token_ids: Annotated[list[int] | None, each(at_least(0))] = option(
        None, "Ids of the image and video placeholder tokens. None: found from the model and processor."
    )
    hidden_similarity_layer: Annotated[int, at_least(-1000)] = option(
        -1,
        "Hidden states that similarity to the image is taken of: 0 is what goes into the first layer, -1 what the last "
        "one returns.",
    )
    hidden_similarity_over: Annotated[str, one_of("max", "mean", "centre")] = option(
        "max",
        "Similarity of a token's hidden state to the image: max or mean of its cosines to the image tokens', or "
        "centre, the cosine to their mean.",
    )
    mdi_balance_ratio: Annotated[float, in_range(1 + 1e-9, 1e30, "above 1")] = option(
        2.0, "VGR (or its inverse) at which the MDI balance is 0; above 1."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Options of the perturbed image, and of the loss terms that use it.


_Strength = Annotated[float, in_range(0, 1e6, "in [0, 1e6]")]


@dataclass
class PerturbationOptions(PluginOptions):
    """How an image is perturbed to see which tokens depend on it."""

    perturbation: str = option(
        "blacken_patches",
        f"How images are perturbed: {', '.join(PERTURBATIONS)}, those of installed packages, dotted paths "
        "or files (my_perturbations.py:my_perturbation).",
    )
    further_perturbations: list[str] | None = option(
        None, "Further perturbations for the dependency, in the same pass."
    )
    dependency_over: Annotated[str, one_of("mean", "min")] = option(
        "mean", "Of a token's dependencies under them, the mean or the min."
    )
    patch_size: PositiveInt = option(14, "Side of the squares of blacken_patches and shuffle_patches, in pixels.")
    black_prob: Share = option(0.5, "Probability that a square is blackened, in [0, 1].")
    noise_std: _Strength = option(189.0, "Standard deviation of add_gaussian_noise, on the scale 0 to 255.")
    blur_radius: _Strength = option(6.0, "Radius of gaussian_blur, in pixels.")
    diffusion_steps: Annotated[int, at_least(0), in_range(0, 999, "in [0, 999]")] = option(
        500, "Steps of diffusion_noise, 0 to 999."
    )
    crop_share: Fraction = option(0.5, "Share of an image that crop_image keeps, in (0, 1].")
    mask_value: Annotated[int, at_least(0), in_range(0, 255, "in [0, 255]")] = option(
        128, "Grey value of mask_image, 0 to 255."
    )
    perturb_per: Annotated[str, one_of("prompt", "completion")] = option(
        "prompt", "prompt: the completions of a prompt share one perturbed image; completion: one for each."
    )
    perception_loss_weight: Weight = option(
        0.0, "Weight of the implicit perception loss of PAPO, its gamma (a gradient pass of its own); 0: none."
    )
    der_loss_weight1: Weight = option(
        0.0, "Weight of the entropy term on the original image, eta 1 of PAPO's double entropy."
    )
    der_loss_weight2: Weight = option(
        0.0, "Weight of the entropy term on the perturbed image, eta 2 of PAPO's double entropy."
    )

    @property
    def perturbations(self) -> list[str]:
        """All that the dependency is measured under."""
        return [self.perturbation, *(self.further_perturbations or ())]

    @property
    def views(self) -> list[str]:
        """All perturbations that this run names, those that plug-ins read among them."""
        return list(dict.fromkeys([*self.perturbations, *self.read_views(False)]))

    def read_views(self, depends: bool) -> list[str]:
        """Return the perturbations under which completions are scored.

        Args:
            depends: whether something reads the dependency.
        """
        readers = self.readers()
        own = self.perturbations if depends or "views" in readers else [self.perturbation] * ("shift" in readers)
        read = [need.removeprefix(VIEW) for need in readers if need.startswith(VIEW)]
        return list(dict.fromkeys([*own, *read]))

    def parameters_of(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of a perturbation."""
        parameters: dict[str, dict[str, Any]] = {
            "blacken_patches": {"patch_size": self.patch_size, "black_prob": self.black_prob},
            "add_gaussian_noise": {"std": self.noise_std},
            "gaussian_blur": {"radius": self.blur_radius},
            "mask_image": {"value": self.mask_value},
            "shuffle_patches": {"patch_size": self.patch_size},
            "crop_image": {"share": self.crop_share},
            "diffusion_noise": {"steps": self.diffusion_steps},
            REMOVE_IMAGE: {},
        }
        if name in parameters:
            return parameters[name]
        own = self.plugin_values(registries.perturbations.load(name), name)
        return {} if own is self else dict(vars(own))

    @property
    def uses_perception_loss(self) -> bool:
        """Whether the loss has a term that needs gradients through the perturbed image."""
        return self.perception_loss_weight > 0 or self.der_loss_weight2 > 0

    def check_perceive(self) -> None:
        """Raise `ConfigError` for perturbations that cannot be used, and for a text in the place of names."""
        for name in ("credit_rules", "signals", "further_perturbations"):
            check_list(name, getattr(self, name))
        for name in self.views:
            if name not in PERTURBATIONS:
                registries.perturbations.load(name)
        if len(set(self.perturbations)) < len(self.perturbations):
            raise ConfigError(f"further_perturbations is {self.further_perturbations}: give each perturbation once.")
        if self.uses_perception_loss and self.perturbation == REMOVE_IMAGE:
            raise ConfigError(
                f"perturbation is {REMOVE_IMAGE} with perception_loss_weight or der_loss_weight2, whose pass takes the "
                "same prompts with other images: give another perturbation, and this one as further_perturbations."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Options of completions that are sampled from a perturbed image, and trained on the clean one (NoisyRollout).


DECAYS = ("none", "linear", "power", "exponential", "sigmoid")
_STRENGTHS = {  # perturbation -> the argument that grows with its strength
    "blacken_patches": "black_prob", "add_gaussian_noise": "std", "gaussian_blur": "radius", "diffusion_noise": "steps",
}  # fmt: skip


@dataclass
class NoisyOptions(PerturbationOptions):
    """Completions sampled from a perturbed image (NoisyRollout, https://huggingface.co/papers/2504.13055)."""

    noisy_generations: Natural = option(
        0,
        "Completions of each prompt that are sampled from a perturbed image and trained on the clean one "
        "(NoisyRollout), 0 to num_generations.",
    )
    noisy_perturbation: str = option(
        "diffusion_noise", "How images are perturbed for noisy_generations, as perturbation."
    )
    noisy_importance: Annotated[str, one_of("clean", "perturbed")] = option(
        "clean",
        "Image of the old log-probabilities of noisy_generations: clean, as published, or perturbed, that of the "
        "policy that generated (a scoring pass more).",
    )
    noisy_decay: Annotated[str, one_of(*DECAYS)] = option(
        "none", "How the noise falls over the run: none, linear, power, exponential or sigmoid."
    )
    noisy_decay_of: Annotated[str, one_of("strength", "generations", "both")] = option(
        "strength", "What noisy_decay lowers: strength, generations, or both."
    )
    noisy_decay_coef: Annotated[float, in_range(1e-9, 1e6, "above 0")] = option(
        30.0,
        "c of noisy_decay, above 0: 1 - s^c (power), 1 - c^(steps left), with c below 1 (exponential), 1 - sigmoid(c "
        "(s - midpoint)).",
    )
    noisy_decay_midpoint: Annotated[float, in_range(0, 1e9, "of at least 0")] = option(
        40.0, "Step at which the sigmoid decay is 1/2."
    )

    @property
    def noisy_perturbations(self) -> list[str]:
        """What images are perturbed by for generation: one perturbation, or none."""
        return [self.noisy_perturbation] if self.noisy_generations else []

    def noise_left(self, step: int, total: int) -> float:
        """Return how much of the noise is left in a step, in [0, 1].

        Args:
            step: from 1.
        """
        return decay(self.noisy_decay, step, total, self.noisy_decay_coef, self.noisy_decay_midpoint)

    def noisy_parameters(self, strength: float) -> dict[str, Any]:
        """Return the keyword arguments of the perturbation at a share of its strength, in [0, 1]."""
        parameters = dict(self.parameters_of(self.noisy_perturbation))
        if self.noisy_perturbation == "crop_image":
            parameters["share"] = 1 - (1 - parameters["share"]) * strength
        elif (name := _STRENGTHS.get(self.noisy_perturbation)) is not None:
            weaker = parameters[name] * strength
            parameters[name] = int(weaker) if name == "steps" else weaker
        elif self._takes_strength():
            parameters["strength"] = strength
        return parameters

    def _takes_strength(self) -> bool:
        function = registries.perturbations.load(self.noisy_perturbation)
        return "strength" in inspect.signature(function).parameters

    def check_noisy(self) -> None:
        """Raise `ConfigError` for values that do not go together."""
        if self.noisy_decay == "exponential" and self.noisy_decay_coef >= 1:
            raise ConfigError(
                f"noisy_decay_coef is {self.noisy_decay_coef} with noisy_decay exponential: give a number below 1, "
                "such as 0.95."
            )
        name = self.noisy_perturbation
        if name == REMOVE_IMAGE:
            raise ConfigError(f"noisy_perturbation is {name}, which changes the prompt: give one that changes images.")
        if name not in PERTURBATIONS:
            registries.perturbations.load(name)
        falls = self.noisy_generations and self.noisy_decay != "none" and self.noisy_decay_of != "generations"
        if falls and name not in (*_STRENGTHS, "crop_image") and not self._takes_strength():
            raise ConfigError(
                f"noisy_perturbation is {name}, which has no strength that noisy_decay could lower: give "
                "noisy_decay_of generations, or another perturbation."
            )


def decay(kind: str, step: int, total: int, coefficient: float, midpoint: float) -> float:
    """Return how much of the noise is left in a step, in [0, 1], as the code of NoisyRollout has it.

    With s = step / total: 1 (`none`), 1 - s (`linear`), 1 - s^c (`power`), 1 - c^(total - step) (`exponential`), or
    1 - 1 / (1 + exp(-c (s - midpoint / total))) (`sigmoid`).

    Args:
        kind: of `DECAYS`.
        step: from 1 to total.
        total: steps of the run.
        coefficient: c.
        midpoint: step.
    """
    share = step / total
    left = {
        "none": lambda: 1.0,
        "linear": lambda: 1 - share,
        "power": lambda: 1 - share**coefficient,
        "exponential": lambda: 1 - coefficient ** (total - step),
        "sigmoid": lambda: 1 / (1 + math.exp(min(coefficient * (share - midpoint / total), 700))),
    }[kind]()
    return float(min(max(left, 0.0), 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Options of what is recorded of a run, and of the logs that people read.


LOG_OPTIONS = ("rollout_log_path", "eval_log_path", "attention_diag_log_path", "token_weights_log_path")


@dataclass
class ReportOptions:
    """What is recorded of the rollouts, for `vgr-trl report` and for the eye."""

    rollout_log_steps: Natural = option(
        10,
        "Record completions in output_dir/rollouts at the first rollout of every so many steps and at each evaluation; "
        "0: never.",
    )
    rollout_log_samples: PositiveInt = option(4, "Completions per record: the first two of each prompt.")
    rollout_log_max_megabytes: Annotated[float, in_range(1, 1e9, "of at least 1")] = option(
        512,
        "Bound of records and thumbnails, whose oldest but the first ones go beyond it; of the tables of "
        "log_completions likewise; of rollouts/logs.jsonl, of which every second entry goes then; and of each Markdown "
        "file, to which nothing is added.",
    )
    markdown_logs: Switch = option(
        True, "Write the recorded completions, with their token weights, as Markdown to output_dir/training_logs too."
    )
    rollout_log_path: str | None = option(None, "Another Markdown file for the recorded completions of training.")
    eval_log_path: str | None = option(None, "Another Markdown file for the recorded completions of evaluations.")
    attention_diag_log_path: str | None = option(
        None, "Another Markdown file for the attention of the recorded completions, by segment of layers."
    )
    token_weights_log_path: str | None = option(None, "Markdown file for token weights, for instance token_weights.md.")
    realtime_rollout_logging: bool = option(
        False, "Append to the Markdown files as soon as a rollout is judged, not when the trainer logs."
    )
    prompt_preview_length: Annotated[int | None, at_least(1)] = option(
        600, "Characters of a prompt in the Markdown files. None: all."
    )
    completion_preview_length: Annotated[int | None, at_least(1)] = option(
        2000, "Characters of a completion in the Markdown files. None: all."
    )
    metric_names: Annotated[str, one_of("trl", "verl")] = option(
        "trl", "Names of metrics in trackers (wandb, TensorBoard, …): trl or verl."
    )
    colorize_output: bool = option(False, "Print the recorded completions on the terminal, with coloured tokens.")

    def check_report(self) -> None:
        """Raise `ConfigError` for logs that nothing would be written to."""
        given = {name: getattr(self, name) for name in LOG_OPTIONS if getattr(self, name) is not None}
        for name, path in given.items():
            if not isinstance(path, str) or not path.strip():
                raise ConfigError(f"{name} is {path!r}: give the path of a Markdown file, or leave it out.")
        wanting = [*given, *(["colorize_output"] if self.colorize_output else [])]
        if wanting and self.rollout_log_steps == 0:
            raise ConfigError(
                f"{wanting[0]} is given, but rollout_log_steps is 0, so nothing is recorded: give rollout_log_steps of "
                "at least 1."
            )
        if len(set(given.values())) < len(given):
            raise ConfigError(
                f"{' and '.join(given)} name the same file ({', '.join(given.values())}): give each a file of its own."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Options of what is left out of the passes because it changes no parameter.


SWITCHES = (
    *("skip_dead_rows", "skip_dead_tokens", "skip_padding"),
    *("pack_completions", "deal_by_length", "reuse_first_pass"),
)
_AutoOrOff = Annotated[str, one_of("auto", "off")]


@dataclass
class EfficiencyOptions:
    """What is left out of training passes because it has no gradient.

    Each is `auto`: on wherever nothing but rounding changes, with one line at the start that says where and why not
    elsewhere; or `off`.
    """

    skip_dead_rows: _AutoOrOff = option(
        "auto",
        "Leave completions without a gradient out of training passes. auto: wherever nothing else in the loss reads "
        "them; off.",
    )
    skip_dead_tokens: _AutoOrOff = option(
        "auto",
        "Leave tokens without a gradient out of the head in training passes. auto: wherever nothing else in the loss "
        "reads them; off.",
    )
    skip_padding: _AutoOrOff = option(
        "auto",
        "Cut training passes to the longest prompt and the last scored token of a micro-batch. auto: wherever "
        "positions do not count padding; off.",
    )

    pack_completions: _AutoOrOff = option(
        "auto",
        "Let completions of unequal length pass behind shared prompts in one row without padding, in training. auto: "
        "wherever attention is flash and positions do not count padding; off.",
    )
    deal_by_length: _AutoOrOff = option(
        "auto",
        "Deal the rows of an optimizer step to its micro-batches by length, groups together. auto: wherever the loss "
        "does not depend on which rows share a micro-batch; off.",
    )
    reuse_first_pass: _AutoOrOff = option(
        "auto",
        "Take old log-probabilities from the first training pass instead of a pass of their own. auto: wherever the "
        "policy has not changed in between and nothing reads them before; off.",
    )
    max_tokens_per_micro_batch: Annotated[int | None, at_least(1)] = option(
        None,
        "Run the rows of per_device_train_batch_size in as many parts as it takes for no pass of training or scoring "
        "to compute more tokens than this, padding included, as far as single rows allow; the update is the same. "
        "None: in one.",
    )
