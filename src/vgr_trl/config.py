"""Options of this library, grouped by subject; `DAPOConfig` adds them to the options of TRL.

An option is declared once: default, help, range or choices, and needs (`vgr_trl.options.option`).
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from vgr_trl import registries
from vgr_trl.errors import ConfigError
from vgr_trl.options import RATIO_LOSSES, option, read_mapping
from vgr_trl.registries import DESCRIBER, LOGPS_PREFIX, TEACHER, TERM_NEEDS, build_options, needed_signals, short_name

# Plug-ins by name, and their own options.

RULES: Mapping[str, Mapping[str, Any]] = {  # name of a credit rule of this library -> the options that switch it on
    "token_weights": {"token_weights": True},
    "perception_filter": {"enable_perception_filtering": True, "perception_weighting": "filter"},
    "perception_weights": {"enable_perception_filtering": True, "perception_weighting": "soft"},
    "entropy_filter": {"enable_entropy_filtering": True},
    "trajectory_scale": {"enable_trajectory_reweighting": True},
}
REMOVE_IMAGE = "remove_image"  # the only perturbation that changes the prompt, not the image
PERTURBATIONS: Mapping[str, Mapping[str, str]] = {  # of this library -> keyword arguments and the options that set them
    "blacken_patches": {"patch_size": "patch_size", "black_prob": "black_prob"},
    "add_gaussian_noise": {"std": "noise_std"},
    "gaussian_blur": {"radius": "blur_radius"},
    "mask_image": {"value": "mask_value"},
    "shuffle_patches": {"patch_size": "patch_size"},
    "crop_image": {"share": "crop_share"},
    "diffusion_noise": {"steps": "diffusion_steps"},
    "lower_resolution": {"scale": "resolution_scale"},
    "compress_jpeg": {"quality": "jpeg_quality"},
    REMOVE_IMAGE: {},
}

PER_WINDOW = ("dapo", "cispo", "vespo")  # losses that are divided by the tokens of the optimizer step


@dataclass
class PluginOptions:
    """Plug-ins: signals, credit rules, loss terms and perturbations of your own; see docs/extending.md."""

    # fmt: off
    credit_rules: list[str] | None = option(None, f"Rules that give tokens credit: {', '.join(RULES)}; vgpo, pgpo, "
        "vepo, anchor_tokens, rlsd, distil, prpo, tor; names of plug-ins, dotted paths or files (my_rules.py:my_rule).")
    loss_terms: list[str] | None = option(None, "Terms to add to the loss: teacher_divergence, gated_distillation; "
        "names of plug-ins, dotted paths or files (my_terms.py:my_term).")
    signals: list[str] | None = option(None, "Token signals to measure, log and pass to rewards: names, dotted paths "
        "or files (my_signals.py:my_signal).")
    plugin_options: dict[str, Any] | str | None = option(None, "Options of these plug-ins, as JSON or a mapping.")
    # fmt: on

    @property
    def plugin_rules(self) -> list[str]:
        """Return the credit rules that are plug-ins."""
        return [name for name in self.credit_rules or () if name not in RULES]

    def plugin_values(self, plugin: Any) -> Any:
        """Return the values of a plug-in's own options, or all options of the run if it declares none."""
        options = registries.declared_options(plugin)
        return self if options is None else build_options(options, read_mapping("plugin_options", self.plugin_options))

    def readers(self) -> dict[str, list[str]]:
        """Return the measurements that plug-ins read, each with the signals and credit rules that need it."""
        needs = [(f"the signal {name}", [name]) for name in self.signals or ()]
        rules = {name: registries.credit_rules.load(name) for name in self.plugin_rules}
        needs += [(f"the credit rule {name}", [*needed_signals(rule)]) for name, rule in rules.items()]
        readers: dict[str, list[str]] = {}
        for reader, names in needs:
            for measurement in registries.find_measurements(names):
                readers.setdefault(measurement, []).append(reader)
        return readers


# Measurements.


def why_no_engine(args: Any) -> str | None:
    """Return why no engine returns log-probabilities; None: one does."""
    has_engine = args.use_vllm or args.use_transformers_continuous_batching or args.cache_implementation
    return None if has_engine else "transformers generates without cache_implementation"


@dataclass
class MeasureOptions(PluginOptions):
    """Attention of the generated tokens to the image and to the instruction."""

    # fmt: off
    compute_attention_metrics: bool | None = option(None, "Log attention to image and instruction. None: if possible.")
    attention_source: Literal["scoring", "generate"] = option("scoring", "scoring: measure attention in a scoring "
        "pass per rollout, with any backend; generate: while transformers generates, log-probabilities and entropies "
        "too, without that pass (but for records, hidden states, and KL in the reward).", needs="attention")
    attention_rows: Literal["auto", "all"] = option("auto", "auto: measure every completion where a reward (with "
        "**kwargs, any), credit rule or signal reads attention, else the recorded completions and one group per "
        "rollout and process; all: every completion.", needs="attention")
    attention_segments: Literal["thirds", "ends"] = option("thirds", "thirds: early, middle and late thirds of the "
        "layers; ends: first, middle and last two.", needs="attention")
    check_pixels: bool = option(True, "Score one group behind a blank image after the first rollout; stop if nothing "
        "changes.")
    engine_distance_limit: float | None = option(0.1, "End the run if an engine's log-probabilities are so far from "
        "the trainer's, in nats per token, and 10 times as far as in the first rollout; 0 or None: off.", ge=0,
        needs=why_no_engine)
    vision_token_ids: list[int] | None = option(None, "Image and video placeholder tokens. None: the model's.", ge=0,
        needs="attention")
    hidden_similarity_layer: int = option(-1, "Layer whose hidden states are compared with those of the image; 0: the "
        "embeddings, -1: the last layer.", ge=-1000, needs="similarity")
    hidden_similarity_over: Literal["max", "mean", "centre"] = option("max", "Similarity of a hidden state to the "
        "image: max or mean of its cosines with the image tokens; centre: cosine with their mean.", needs="similarity")
    mdi_balance_ratio: float = option(2.0, "VGR (or inverse) at which the MDI balance is 0.", gt=1, needs="attention")
    # fmt: on


def used_by(*names: str) -> Callable[[Any], str | None]:
    """Return a function that says why an option of these perturbations is unused; no names: of any perturbation."""

    def reason(args: Any) -> str | None:
        used = {*args.read_perturbations(args.needs_dependency), *(args.sampled_perturbations if names else ())}
        used |= {args.perturbation} if "perturbed" in args.term_needs() else set()
        if not used:
            return "nothing is measured on perturbed images"
        return None if not names or used & set(names) else f"images are perturbed by {' and '.join(sorted(used))}"

    return reason


def _unless_views(args: Any) -> str | None:
    reads = args.needs_dependency or "views" in args.readers()
    return None if reads else "no credit rule and no signal reads the dependency"


@dataclass
class PerturbationOptions(PluginOptions):
    """Perturbation of images, to find the tokens that depend on them."""

    # fmt: off
    perturbation: str = option("blacken_patches", f"How images are perturbed: {', '.join(PERTURBATIONS)}, those of "
        "installed packages, dotted paths or files (my_perturbations.py:my_perturbation).", needs=used_by())
    further_perturbations: list[str] | None = option(None, "Further perturbations; the dependency is "
        "taken over all of them.", needs=_unless_views)
    dependency_over: Literal["mean", "min"] = option("mean", "Mean or min of the dependency over all perturbations.",
        needs="further_perturbations")
    patch_size: int = option(14, "Side of the squares, in pixels.", ge=1,
        needs=used_by("blacken_patches", "shuffle_patches"))
    black_prob: float = option(0.5, "Probability of a black square.", ge=0, le=1, needs=used_by("blacken_patches"))
    noise_std: float = option(189.0, "Std of add_gaussian_noise.", ge=0, le=1e6, needs=used_by("add_gaussian_noise"))
    blur_radius: float = option(6.0, "Radius of gaussian_blur.", ge=0, le=1e6, needs=used_by("gaussian_blur"))
    diffusion_steps: int = option(500, "Steps of diffusion_noise.", ge=0, le=999, needs=used_by("diffusion_noise"))
    crop_share: float = option(0.5, "Image share that crop_image keeps.", gt=0, le=1, needs=used_by("crop_image"))
    resolution_scale: float = option(0.25, "Scale to which lower_resolution shrinks both sides.", gt=0, le=1,
        needs=used_by("lower_resolution"))
    jpeg_quality: int = option(10, "Quality of compress_jpeg.", ge=1, le=100, needs=used_by("compress_jpeg"))
    mask_value: int = option(128, "Grey of mask_image, 0 to 255.", ge=0, le=255, needs=used_by("mask_image"))
    perturb_per: Literal["prompt", "completion"] = option("prompt", "Draw a perturbed image per prompt, or completion.",
        needs=used_by())
    perturb_images: Literal["all", "prompt", "tools"] = option("all", "With tools: perturb all images of a "
        "completion, those of the prompt, or those that tools returned.", needs=used_by())
    teacher_view: str | None = option(None, "View of a row that a teacher sees, who scores each token: crop_to_box, "
        "teacher_images, sharper, clean, original, privileged_context, those of installed packages, dotted paths or "
        "files (my_views.py:my_view).")
    teacher_weights: Literal["policy", "reference"] = option("policy", "Weights of the teacher: the policy's at the "
        "rollout, or the reference model's (the initial ones, unless sync_ref_model).", needs="teacher_view")
    teacher_description_view: str | None = option(None, "View that the teacher sees in its place for the tokens up to "
        "the end of the description (blind_tag), such as clean, so that the image tells it.", needs="teacher_view")
    distil_failed_only: str | None = option(None, "Reward function, or part of its name: the teacher sees the "
        "completions alone to which it gives 0 or less. None: all.", needs="teacher_view")
    perception_loss_weight: float = option(0.0, "Weight of PAPO's perception loss (one more gradient pass).", ge=0)
    der_loss_weight1: float = option(0.0, "Weight of the entropy on the original image (eta 1 of PAPO).", ge=0)
    der_loss_weight2: float = option(0.0, "Weight of the entropy on the perturbed image (eta 2 of PAPO).", ge=0)
    # fmt: on

    @property
    def sampled_perturbations(self) -> list[str]:
        """Perturbations of images for generation, which `NoisyOptions` and `DegradedOptions` add."""
        return []

    @property
    def perturbations(self) -> list[str]:
        """Perturbations that the dependency is measured under."""
        return [self.perturbation, *(self.further_perturbations or ())]

    def read_perturbations(self, depends: bool) -> list[str]:
        """Return the perturbations under which completions are scored.

        Args:
            depends: whether a credit rule or signal reads the dependency.
        """
        readers = self.readers()
        own = self.perturbations if depends or "views" in readers else [self.perturbation] * ("shift" in readers)
        read = [need.removeprefix(LOGPS_PREFIX) for need in readers if need.startswith(LOGPS_PREFIX)]
        return [name for name in dict.fromkeys([*own, *read]) if name not in {TEACHER, *self.row_views}]

    @property
    def row_views(self) -> dict[str, str]:
        """Map the names of the views of rows under which completions are scored to their plug-ins."""
        read = [need.removeprefix(LOGPS_PREFIX) for need in self.readers() if need.startswith(LOGPS_PREFIX)]
        views = {name: name for name in read if name in registries.views.names()}
        taught = {TEACHER: self.teacher_view, DESCRIBER: self.teacher_view and self.teacher_description_view}
        return views | {name: view for name, view in taught.items() if view is not None}

    def parameters_of(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of a perturbation."""
        if name in PERTURBATIONS:
            return {keyword: vars(self)[option] for keyword, option in PERTURBATIONS[name].items()}
        plugin = registries.views if name in self.row_views.values() else registries.perturbations
        own = self.plugin_values(plugin.load(name))
        return {} if own is self else dict(vars(own))

    def weakened_parameters(self, name: str, strength: float) -> dict[str, Any]:
        """Return the keyword arguments of a perturbation at a share of its strength, in [0, 1]."""
        parameters = self.parameters_of(name)
        if name in _STRENGTHS:
            argument, weakest = _STRENGTHS[name]
            value = weakest + (parameters[argument] - weakest) * strength
            parameters[argument] = int(value) if isinstance(weakest, int) else value
        elif takes_strength(name):
            parameters["strength"] = strength
        return parameters


_STRENGTHS: Mapping[str, tuple[str, float]] = {  # perturbation -> argument of its strength, weakest value
    "blacken_patches": ("black_prob", 0.0), "add_gaussian_noise": ("std", 0.0), "gaussian_blur": ("radius", 0.0),
    "diffusion_noise": ("steps", 0), "crop_image": ("share", 1.0), "lower_resolution": ("scale", 1.0),
    "compress_jpeg": ("quality", 100),
}  # fmt: skip


def takes_strength(perturbation: str) -> bool:
    """Return whether a perturbation can be made weaker."""
    if perturbation in PERTURBATIONS:
        return perturbation in _STRENGTHS
    return "strength" in inspect.signature(registries.perturbations.load(perturbation)).parameters


@dataclass
class NoisyOptions(PerturbationOptions):
    """Completions sampled from a perturbed image (NoisyRollout, https://huggingface.co/papers/2504.13055)."""

    # fmt: off
    noisy_generations: int = option(0, "Completions per prompt sampled from a perturbed image.", ge=0)
    noisy_perturbation: str = option("diffusion_noise", "Perturbation of their image.", needs="noisy_generations")
    noisy_importance: Literal["clean", "perturbed"] = option("clean", "Image for their old log-probabilities: "
        "clean, as published, or perturbed, as generated (one more pass).", needs="noisy_generations")
    noisy_decay: Literal["none", "linear", "power", "exponential", "sigmoid"] = option("none", "Decay of the noise "
        "over the run.", needs="noisy_generations")
    noisy_decay_of: Literal["strength", "generations", "both"] = option("strength", "Decay the strength of "
        "the noise, noisy_generations, or both.", needs={"noisy_decay": ("linear", "power", "exponential", "sigmoid")})
    noisy_decay_coef: float = option(30.0, "c of noisy_decay: 1 - s^c, 1 - c^(steps left), 1 - sigmoid(c (s - "
        "midpoint)).", gt=0, le=1e6, needs={"noisy_decay": ("power", "exponential", "sigmoid")})
    noisy_decay_midpoint: float = option(40.0, "Step at which the sigmoid is at one half.", ge=0,
        needs={"noisy_decay": ("sigmoid",)})
    # fmt: on

    @property
    def sampled_perturbations(self) -> list[str]:
        """Perturbation of images for generation, in a list that may be empty."""
        return [self.noisy_perturbation] if self.noisy_generations else []

    def noise_left(self, step: int, total: int) -> float:
        """Return the share of the noise left in a step, in [0, 1], as in the code of NoisyRollout.

        With s = step / total and c = `noisy_decay_coef`: 1 (`none`), 1 - s (`linear`), 1 - s^c (`power`),
        1 - c^(total - step) (`exponential`), or 1 - 1 / (1 + exp(-c (s - midpoint / total))) (`sigmoid`).

        Args:
            step: step of the run, from 1 to `total`.
            total: number of steps of the run.
        """
        share, coefficient, midpoint = step / total, self.noisy_decay_coef, self.noisy_decay_midpoint
        left = {
            "none": lambda: 1.0,
            "linear": lambda: 1 - share,
            "power": lambda: 1 - share**coefficient,
            "exponential": lambda: 1 - coefficient ** (total - step),
            "sigmoid": lambda: 1 / (1 + math.exp(min(coefficient * (share - midpoint / total), 700))),
        }[self.noisy_decay]()
        return float(min(max(left, 0.0), 1.0))


@dataclass
class DegradedOptions(NoisyOptions):
    """Rollout and loss on degraded images, with a teacher that sees the originals (S2VOPD)."""

    # fmt: off
    degraded_by: str | None = option(None, "Perturbation of the images that training rollouts and their loss see; the "
        "teacher_view original is without it. None: none.")
    degraded_from: float = option(1.0, "Strength in the first step, as a share of the options of the perturbation; it "
        "grows linearly to 1 in the last.", ge=0, le=1, needs="degraded_by")
    degraded_untouched: float = option(0.0, "Share of prompts whose images stay as they are.", ge=0, le=1,
        needs="degraded_by")
    # fmt: on

    @property
    def sampled_perturbations(self) -> list[str]:
        """Perturbations of images for generation."""
        return [*super().sampled_perturbations, *([self.degraded_by] if self.degraded_by else [])]

    def degraded_strength(self, step: int, total: int) -> float:
        """Return the share of the degrading's strength in a step (from 1), in [0, 1]."""
        return self.degraded_from + (1 - self.degraded_from) * (min(step - 1, total - 1) / max(total - 1, 1))


# Blind answers: questions answered again from the description of the image in a completion.

BLIND_PROMPT = (
    "This is what was written about an image that you cannot see:\n{description}\n\nQuestion: {question}\n\nAnswer the "
    "question from this description alone. Write your reasoning between <think> and </think>, then only the final "
    "answer between <answer> and </answer>. For a multiple-choice question the final answer is the letter of the right "
    "option."
)


@dataclass
class BlindOptions:
    """Blind answers: the question is asked again without its image (Vision-SR1, https://huggingface.co/papers/2508.19652)."""

    # fmt: off
    blind_tag: str = option("description", "Tag around the image's description in a completion.",
        needs={"blind_answers": True, "teacher_description_view": True})
    blind_without_tag: Literal["wrong", "completion"] = option("wrong", "Blind answer to a completion without a "
        "description: wrong, or sampled from the whole completion.", needs="blind_answers")
    blind_prompt: str = option(BLIND_PROMPT, "Prompt of a blind answer, with {description} and {question}.",
        needs="blind_answers")
    # fmt: on


# From rewards to the loss: groups, credit, critic, KL.

Estimator = Literal["grpo", "rloo", "remax", "reinforce_plus_plus", "grpo_passk", "gae"]
ESTIMATORS = get_args(Estimator)
GROUP_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "gae")


@dataclass
class GroupOptions:
    """Advantages, zero-variance groups and the replay buffer."""

    # fmt: off
    advantage_estimator: Estimator = option("grpo", "How rewards become advantages.")
    replay_buffer_size: int = option(0, "Groups kept to replace zero-variance groups; 0: none.", ge=0)
    replay_var_epsilon: float = option(1e-6, "Largest |advantage| (grpo: deviation of rewards) of a zero-variance "
        "group.", ge=0, needs={"replay_buffer_size": True, "dynamic_sampling": True, "online_filtering": True,
        "enable_trajectory_reweighting": True})
    filter_min_reward: float | None = option(None, "Minimum mean reward of a stored group.", needs="replay_buffer_size")
    replay_max_age: int | None = option(None, "Drop stored groups after N steps.", ge=1, needs="replay_buffer_size")
    dynamic_sampling: Literal["resample"] | None = option(None, "resample: sample more prompts while there are "
        "zero-variance groups.", needs={"advantage_estimator": GROUP_ESTIMATORS, "online_filtering": True})
    dynamic_sampling_max_rounds: int = option(3, "Maximum sampling rounds per batch.", ge=1, needs="dynamic_sampling")
    online_filtering: bool = option(False, "Drop groups whose mean filter_key is outside (filter_low, filter_high).")
    filter_key: str = option("accuracy", "Reward that online filtering reads: a reward function, or part of its name; "
        "or overall, the weighted sum.", needs="online_filtering")
    filter_mode: Literal["bounds", "quantile"] = option("bounds", "Whether filter_low and filter_high are values, or "
        "quantiles of the rollout.", needs="online_filtering")
    filter_low: float = option(0.01, "Exclusive lower bound, or quantile.", needs="online_filtering")
    filter_high: float = option(0.99, "Exclusive upper bound, or quantile.", needs="online_filtering")
    # fmt: on

    @property
    def selects_groups(self) -> bool:
        """Whether groups can be replaced."""
        return self.replay_buffer_size > 0 or self.dynamic_sampling is not None or self.online_filtering


@dataclass
class CreditOptions(PerturbationOptions):
    """Token credit: the share of the advantage that each token gets."""

    # fmt: off
    token_weights: bool = option(False, "Weight tokens by their attention to the image (VGR per token).")
    token_weights_topk_ratio: float | None = option(None, "Share of tokens that keep their weight; others get 1.",
        gt=0, le=1, needs="token_weights")
    token_weights_clip: list[float] = option([0.2, 3.0], "Smallest and largest weight before normalisation, around 1.",
        ge=0, needs={"token_weights": True, "perception_weighting": ("soft",)})
    token_weights_smooth_sigma: float = option(0.0, "Gaussian sigma, in tokens.", ge=0, le=1e6, needs="token_weights")
    token_weights_last_k_layers: int | None = option(None, "Read attention of the last N layers. None: "
        "the late segment.", ge=1, needs="token_weights")
    token_weights_positive_only: bool = option(False, "Weight positive advantages only.", needs="token_weights")
    enable_perception_filtering: bool = option(False, "Give credit only to the tokens that depend most on the image.")
    top_p_perception_tokens: float = option(0.2, "Share of tokens that the filter keeps.", gt=0, le=1,
        needs={"perception_weighting": ("filter",)})
    perception_weighting: Literal["filter", "soft"] = option("filter", "filter: other tokens get no credit; soft: "
        "weights by the dependency.", needs="enable_perception_filtering")
    enable_entropy_filtering: bool = option(False, "Give credit only to tokens of high entropy; both filters: union.")
    top_p_entropy_tokens: float = option(0.2, "Share of tokens kept.", gt=0, le=1, needs="enable_entropy_filtering")
    enable_trajectory_reweighting: bool = option(False, "Scale completions by their mean dependency on the image.")
    trajectory_scaling_min: float = option(0.8, "Smallest scale.", ge=0, le=1, needs="enable_trajectory_reweighting")
    use_entropy_penalty: bool = option(False, "Add entropy_penalty_coef times the mean of -log p to the loss.")
    entropy_penalty_coef: float = option(0.06, "Weight of the entropy penalty.", ge=0, needs="use_entropy_penalty")
    # fmt: on

    def check_plugins(self) -> None:
        """Switch the named rules of this library on; raise `ConfigError` for plug-ins that cannot be used."""
        named = [name for name in self.credit_rules or () if name in RULES]
        if {"perception_filter", "perception_weights"} <= set(named):
            raise ConfigError("credit_rules has perception_filter and perception_weights: give one of them.")
        for name in named:
            vars(self).update(RULES[name])
        perturbations = {*self.perturbations, *self.read_perturbations(False), *self.sampled_perturbations}
        plugins = [registries.perturbations.load(name) for name in sorted(perturbations - PERTURBATIONS.keys())]
        plugins += map(registries.views.load, self.row_views.values())
        for kind in ("credit_rules", "signals", "loss_terms"):
            named_plugins = vars(self)[kind] or ()
            plugins += [vars(registries)[kind].load(name) for name in named_plugins if name not in RULES]
            if len(set(map(short_name, named_plugins))) < len(named_plugins):
                raise ConfigError(f"{kind} is {named_plugins}, where two have the same name: rename one.")
        values = [self.plugin_values(plugin) for plugin in plugins]
        known = sorted({name for own in values if own is not self for name in vars(own)})
        for name in read_mapping("plugin_options", self.plugin_options).keys() - set(known):
            accepted = f"{', '.join(known) or 'none'} to the plug-ins named, and options of rewards"
            raise ConfigError(f"plugin_options has {name!r}: give {accepted} in reward_function_kwargs.")
        self.readers()

    @property
    def needs_dependency(self) -> bool:
        """Whether a credit rule or signal reads the dependency on the image."""
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


@dataclass
class LossOptions(CreditOptions):
    """Terms beside TRL's loss."""

    # fmt: off
    teacher_top_k: int = option(100, "The teacher's most probable tokens that loss terms receive; the rest are pooled; "
        "0: all.", ge=0, needs=lambda args: None if "teacher_top" in args.term_needs() else "no loss term reads them")
    # fmt: on

    @property
    def uses_perception_loss(self) -> bool:
        """Whether PAPO's loss has a term on the perturbed image."""
        return self.perception_loss_weight > 0 or self.der_loss_weight2 > 0

    @property
    def terms(self) -> list[str]:
        """Return the active loss terms: own terms switched on by options, then `loss_terms`."""
        own = {
            "entropy_penalty": self.use_entropy_penalty,
            "perception_loss": self.uses_perception_loss,
            "entropy_loss": self.der_loss_weight1 > 0 and not self.uses_perception_loss,
        }
        return [*(name for name, is_on in own.items() if is_on), *(self.loss_terms or ())]

    def term_needs(self) -> dict[str, str]:
        """Return the quantities that loss terms need, each with the first term that needs it.

        Raises:
            ConfigError: no loss term can get a quantity.
        """
        needs: dict[str, str] = {}
        for name in self.terms:
            for need in needed_signals(registries.loss_terms.load(name)):
                if need not in TERM_NEEDS:
                    raise ConfigError(f"The loss term {name} needs {need!r}, but can need {', '.join(TERM_NEEDS)}.")
                needs.setdefault(need, f"the loss term {name}")
        return needs


GAE = {"advantage_estimator": ("gae",)}
LEARNING_RATES = {"head": 1e-3, "model": 1e-5}  # of the critic


@dataclass
class CriticOptions:
    """Critic: values of tokens for `advantage_estimator gae`."""

    # fmt: off
    gamma: float = option(1.0, "Discount of advantage_estimator gae.", ge=0, le=1, needs=GAE)
    lam: float = option(1.0, "Lambda of advantage_estimator gae.", ge=0, le=1, needs=GAE)
    critic: Literal["head", "model"] = option("head", "head: on the policy's hidden states, which it does not train; "
        "model: a copy of the policy with a scalar head.", needs=GAE)
    critic_learning_rate: float | None = option(None, "Default: 1e-3 (head), 1e-5 (model).", gt=0, needs=GAE)
    critic_warmup_steps: int = option(0, "Learning-rate warm-up, in steps.", ge=0, needs=GAE)
    critic_warmup: int = option(0, "Train only the critic in the first N steps.", ge=0, needs=GAE)
    cliprange_value: float = option(0.5, "Clip range around the rollout's value.", gt=0, needs=GAE)
    # fmt: on


KLKind = Literal["kl", "abs", "mse", "low_var_kl", "full"]


@dataclass
class KLOptions:
    """KL to the reference model; TRL's `beta` is the alternative, and excludes these."""

    # fmt: off
    kl_coef: float = option(0.0, "Coefficient of the KL to the reference, in place of beta; 0: none.", ge=0)
    kl_penalty: KLKind = option("low_var_kl", "Estimator of a token's KL.", needs="kl_coef")
    use_kl_loss: bool = option(True, "KL in the loss; False: subtracted from the rewards, per token.", needs="kl_coef")
    kl_type: Literal["fixed", "adaptive"] = option("fixed", "Keep the coefficient, or adapt it.", needs="kl_coef")
    kl_target: float = option(6.0, "Target of the adaptive coefficient, in nats per token.", gt=0,
        needs={"kl_type": ("adaptive",)})
    kl_horizon: float = option(10_000.0, "Its horizon, in completions.", gt=0, needs={"kl_type": ("adaptive",)})
    # fmt: on

    @property
    def penalises_kl(self) -> bool:
        """Whether the KL is subtracted from the rewards."""
        return self.kl_coef > 0 and not self.use_kl_loss

    @property
    def has_kl_loss(self) -> bool:
        """Whether the KL is added to the loss."""
        return self.kl_coef > 0 and self.use_kl_loss

    @property
    def needs_full_kl(self) -> bool:
        """Whether the KL is taken over the whole vocabulary."""
        return self.kl_coef > 0 and self.kl_penalty == "full"


# Efficiency, evaluation, records.

AutoOrOff = Literal["auto", "off"]


@dataclass
class EfficiencyOptions:
    """Work that training passes skip because it has no gradient.

    Each is `auto`: on wherever nothing but rounding changes, with one line at the start that says where and why not
    elsewhere; or `off`.
    """

    # fmt: off
    skip_zero_advantage: AutoOrOff = option("auto", "Skip rows with zero advantage in training passes.")
    skip_zero_advantage_tokens: AutoOrOff = option("auto", "Skip tokens with zero advantage in the LM head.")
    skip_padding: AutoOrOff = option("auto", "Leave out the tokens behind the last token with loss.")
    reuse_first_pass: AutoOrOff = option("auto", "Take old log-probabilities from the first training pass.")
    cudnn_attention: bool = option(False, "Let sdpa prefer cuDNN's kernel, as torch does from 2.11 on with Hopper and "
        "Blackwell; combine with pad_to_multiple_of 128.")
    rows_per_pass: str = option("auto", "Rows of a training pass. auto: micro-batches are joined, across groups, as "
        "far as memory allows (CPU: two groups); the update is the same. A number: at most so many. off: as given.")
    max_tokens_per_micro_batch: int | None = option(None, "Split micro-batches so that no pass has more tokens than "
        "this, unless one row has; the update is the same. None: off.", ge=1)
    # fmt: on


SWITCHES = tuple(field.name for field in fields(EfficiencyOptions) if field.default == "auto")


@dataclass
class EvaluateOptions:
    """Sampling in evaluations, where it differs from training.

    Log-probabilities are taken at `temperature` all the same.
    """

    # fmt: off
    eval_temperature: float | None = option(None, "Temperature in evaluations; 0: greedy. None: temperature.", ge=0)
    eval_top_p: float | None = option(None, "top_p in evaluations. None: top_p.", gt=0, le=1)
    # fmt: on


LOG_OPTIONS = ("rollout_log_path", "eval_log_path", "attention_diag_log_path", "token_weights_log_path")


def _no_markdown(args: Any) -> str | None:
    return None if args.markdown_logs or any(vars(args)[name] for name in LOG_OPTIONS) else "no Markdown is written"


@dataclass
class ReportOptions:
    """Records of rollouts, for `vgr-trl report` and console logs."""

    # fmt: off
    rollout_log_steps: int = option(10, "Record completions every N steps and in evaluations; 0: never.", ge=0)
    rollout_log_samples: int = option(4, "Completions per record: two per prompt.", ge=1, needs="rollout_log_steps")
    rollout_log_max_megabytes: float = option(512, "Maximum size of records with thumbnails, of log_completions tables "
        "and of each Markdown file; the oldest records after the first are deleted.", ge=1,
        needs={"log_completions": True, "rollout_log_steps": True})
    markdown_logs: bool = option(True, "Also write recorded completions and token weights as Markdown.")
    rollout_log_path: str | None = option(None, "Markdown file for completions of training.", needs="rollout_log_steps")
    eval_log_path: str | None = option(None, "Markdown file for completions of evaluations.", needs="evaluation")
    attention_diag_log_path: str | None = option(None, "Markdown file for attention.", needs="rollout_log_steps")
    token_weights_log_path: str | None = option(None, "Markdown file for token weights.", needs="rollout_log_steps")
    realtime_rollout_logging: bool = option(False, "Accepted for older scripts; no effect.", needs=_no_markdown)
    prompt_preview_length: int | None = option(600, "Prompt characters in Markdown.", ge=1, needs=_no_markdown)
    completion_preview_length: int | None = option(2000, "Completion characters in Markdown.", ge=1, needs=_no_markdown)
    metric_names: Literal["trl", "verl", "mtrl"] = option("trl", "Metric names in trackers; mtrl: verl's, with agent/.")
    colorize_output: bool = option(False, "Print recorded completions in colour.", needs="rollout_log_steps")
    # fmt: on


# Combinations that would not train as requested, or not at all: condition, message.

Conflicts = tuple[tuple[Callable[[Any], Any], str], ...]

# fmt: off
PERTURBATION_CONFLICTS: Conflicts = (
    (lambda o: o.teacher_view is None
        and not {LOGPS_PREFIX + TEACHER, "teacher", "teacher_top"}.isdisjoint({*o.readers(), *o.term_needs()}),
     "teacher_view is None with a signal, credit rule or loss term of a teacher: give it, such as crop_to_box."),
    (lambda o: o.distil_failed_only == "overall",
     "distil_failed_only is overall: give the reward function that judges a completion."),
    (lambda o: len(set(o.perturbations)) < len(o.perturbations),
     "further_perturbations is {o.further_perturbations}: give each perturbation once."),
    (lambda o: not {"entropy_penalty", "perception_loss", "entropy_loss"}.isdisjoint(o.loss_terms or ()),
     "loss_terms is {o.loss_terms}: leave terms of PAPO and VPPO out, and set perception_loss_weight, "
     "der_loss_weight1, der_loss_weight2 and use_entropy_penalty."),
    (lambda o: "perturbed" in o.term_needs() and o.perturbation == REMOVE_IMAGE,
     "perturbation is remove_image with a loss term on perturbed images, whose pass takes the same prompts with other "
     "images: give another perturbation, and this one as further_perturbations."),
    (lambda o: len(o.token_weights_clip) != 2 or not o.token_weights_clip[0] <= 1 <= o.token_weights_clip[1],
     "token_weights_clip is {o.token_weights_clip}: give two numbers low <= 1 <= high, with low at least 0."),
)
CONFLICTS: Conflicts = (
    *PERTURBATION_CONFLICTS,
    (lambda o: o.rows_per_pass not in ("auto", "off") and not re.fullmatch("[1-9][0-9]*", o.rows_per_pass),
     "rows_per_pass is {o.rows_per_pass!r}: give auto, off, or a number of rows."),
    (lambda o: o.output_dir is not None and not str(o.output_dir).strip(), "output_dir is empty: give a folder."),
    (lambda o: o.max_steps == 0 or (o.max_steps < 0 and o.num_train_epochs <= 0),
     "max_steps is {o.max_steps} and num_train_epochs {o.num_train_epochs}, so nothing would be trained."),
    (lambda o: o.save_strategy == "steps" and not o.save_steps > 0, "save_steps is 0: give more, or save_strategy no."),
    (lambda o: o.warmup_ratio is not None and o.warmup_steps not in (0, o.warmup_ratio),
     "warmup_ratio is {o.warmup_ratio} and warmup_steps is {o.warmup_steps}: give one of them."),
    (lambda o: (o.soft_punish_cache or 0) > (o.max_completion_length or math.inf),
     "soft_punish_cache is {o.soft_punish_cache}: give at most max_completion_length, {o.max_completion_length}."),
    (lambda o: o.delta is not None and o.loss_type in RATIO_LOSSES
        and o.delta <= 1 + (o.epsilon if o.epsilon_high is None else o.epsilon_high),
     "delta (clip_ratio_dual) is {o.delta}, which would also clip positive advantages: give above 1 + epsilon_high."),
    (lambda o: o.importance_sampling_level == "sequence" and o.loss_type not in ("cispo", "vespo")
        and (o.shapes_tokens or o.uses_critic),
     "importance_sampling_level is sequence with loss_type {o.loss_type}: the gradient would ignore token weights, "
     "filters and values of tokens; use importance_sampling_level token, or loss_type cispo or vespo."),
    (lambda o: o.kl_coef > 0 and o.beta > 0,
     "kl_coef is {o.kl_coef} and beta is {o.beta}: give kl_coef, or beta (low_var_kl in the loss, as TRL has it)."),
    (lambda o: o.penalises_kl and o.multi_objective_aggregation != "sum_then_normalize",
     "multi_objective_aggregation {o.multi_objective_aggregation} would rescale the KL in rewards: set use_kl_loss."),
    (lambda o: o.uses_critic and o.replay_buffer_size > 0,
     "replay_buffer_size is {o.replay_buffer_size}, but with gae groups keep an earlier critic's advantages: give 0."),
    (lambda o: o.uses_critic and o.critic_warmup > 0 and o.weight_decay > 0,
     "critic_warmup is {o.critic_warmup}, but weight_decay {o.weight_decay} would move the policy in it: give one 0."),
    (lambda o: o.torch_compile and (o.uses_critic or "hidden" in o.term_needs()),
     "torch_compile hides the hidden states that advantage_estimator gae or a loss term reads: drop one."),
    (lambda o: not o.filter_low < o.filter_high or (o.filter_mode == "quantile"
        and not 0 <= o.filter_low < o.filter_high <= 1),
     "filter_low is {o.filter_low!r} and filter_high is {o.filter_high!r}: give filter_low < filter_high, with "
     "filter_mode quantile in [0, 1]."),
    (lambda o: o.eval_temperature == 0 and (o.num_generations_eval or o.num_generations or 1) > 1,
     "eval_temperature is 0, so all completions of a prompt would be alike: give num_generations_eval 1."),
    (lambda o: o.num_generations == 1
        and (o.selects_groups or any((o.reward_weights or [1]) + (o.early_reward_weights or []))),
     "num_generations is 1, but rewards compare the completions of a prompt: give at least 2, or reward_weights of 0 "
     "without replay_buffer_size, dynamic_sampling and online_filtering."),
    (lambda o: o.noisy_generations > (o.num_generations or 0),
     "noisy_generations is {o.noisy_generations}: give at most num_generations, {o.num_generations}."),
    (lambda o: o.noisy_decay == "exponential" and o.noisy_decay_coef >= 1,
     "noisy_decay_coef is {o.noisy_decay_coef} with noisy_decay exponential: give a number below 1, such as 0.95."),
    (lambda o: REMOVE_IMAGE in (o.noisy_perturbation, o.degraded_by),
     "noisy_perturbation or degraded_by is remove_image, which changes the prompt: give one that changes images."),
    (lambda o: o.degraded_by and o.degraded_from < 1 and not takes_strength(o.degraded_by),
     "degraded_by is {o.degraded_by}, which has no strength: give degraded_from 1, or another perturbation."),
    (lambda o: o.noisy_generations and o.noisy_decay != "none" and o.noisy_decay_of != "generations"
        and not takes_strength(o.noisy_perturbation),
     "noisy_perturbation is {o.noisy_perturbation}, which has no strength to decay: give noisy_decay_of generations, "
     "or another perturbation."),
    (lambda o: any(name not in o.blind_prompt for name in ("{description}", "{question}")),
     "blind_prompt lacks {{description}} or {{question}}: it needs both."),
)
# fmt: on


def check_conflicts(options: Any, conflicts: Conflicts = CONFLICTS) -> None:
    """Raise `ConfigError` for the first combination of options that cannot be used."""
    for condition, sentence in conflicts:
        if condition(options):
            raise ConfigError(sentence.format(o=options))
