"""Plan a run's measurements and the work that passes share or skip, with reasons where they do not."""

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.utils import logging

from vgr_trl.credit import builtin_rules
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import BOX_COLUMNS, PRIVILEGED_CONTEXT, TEACHER_IMAGES
from vgr_trl.errors import ConfigError
from vgr_trl.passes.micro_batches import RowsPerPass, describe_spread_groups
from vgr_trl.registries import (
    BLIND_ANSWERS,
    LOGPS_PREFIX,
    TERM_NEEDS,
    find_measurements,
    is_measured_after_rewards,
    needed_signals,
)
from vgr_trl.rewards.calling import may_read_columns
from vgr_trl.run import Features, Measurement, Run, RunFacts
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import (
    Feature,
    base_of,
    causal_model,
    has_active_dropout,
    is_compiled,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.shared_forward import why_not_static
from vgr_trl.signals.named import PER_IMAGE, named_signals, needed_signal_columns
from vgr_trl.signals.probe import (
    count_attention_layers,
    decoder_layers,
    find_decoder,
    hidden_state_number,
    why_not_measurable,
)
from vgr_trl.signals.ratios import last_layers, special_token_ids, vision_token_ids
from vgr_trl.vision import DummyImage, VisionCache, parts_of_tower, tower_trains, why_not_once

logger = logging.get_logger(__name__)


def plan_features(facts: RunFacts, needed: Mapping[str, str], dummy_image: DummyImage | None) -> Features:
    """Plan the features of a run, the same in all processes.

    Args:
        needed: measurements of a rollout, each with its first reader.
        dummy_image: image that every process can put through the vision tower, or None.
    """
    args, causal = facts.args, causal_model(facts.model)
    base, compiled, noise = base_of(causal), _why_compiled(facts), _why_noise(args)
    spread, rows = _why_rollout_is_spread(args), why_rows_matter(facts, args.loss_type)
    headless = "a model that is its own base" if base is causal else None
    sharded = "sharded parameters" if facts.is_sharded else None  # FSDP shards in `train()`
    router = "the load-balancing loss reads all tokens" if facts.has_router_loss else None
    scoring = _why_no_pass_shares(facts) or compiled or headless or why_not_share(facts.model)
    training = scoring or router
    unshared = "training does not share prompts" if training else None
    option = find_every_token_option(args)
    read = compiled or router or (f"{option} reads all tokens" if option else None)

    def off(name: str) -> str | None:
        return f"{name}=off" if vars(args)[name] == "off" else None

    features = Features(
        share_generation=Feature(_why_plain_generation(facts)),
        share_scoring=Feature(scoring),
        share_training=Feature(training),
        join_micro_batches=Feature(off("rows_per_pass") or unshared or rows),
        regroup=Feature(unshared or (None if args.share_prompts == "on" else rows or spread)),
        skip_zero_advantage=Feature(off("skip_zero_advantage") or noise or read or unshared),
        skip_zero_advantage_tokens=Feature(
            off("skip_zero_advantage_tokens") or read or unshared or _why_completions_stay_whole(args)
        ),
        skip_padding=Feature(off("skip_padding") or router or unshared),
        skip_images=Feature(sharded or _why_images_run(base, dummy_image)),
        reuse_first_pass=Feature(off("reuse_first_pass") or _why_scored_before_training(facts, needed)),
    )
    # FSDP may have loaded the weights in the main process alone.
    agreed: Features = broadcast_object_list([features])[0]
    return agreed


def _why_plain_generation(facts: RunFacts) -> str | None:
    """Return why completions are not generated from prompts computed once."""
    args = facts.args
    return (
        _why_no_pass_shares(facts)
        or ("vLLM shares prompts itself" if facts.args.use_vllm else None)
        or ("continuous batching shares prompts itself" if args.use_transformers_continuous_batching else None)
        or ("FSDP" if facts.fsdp_version else None)
        or (why_not_static(facts.model.config) if args.cache_implementation == "static" else None)
        or why_not_share(facts.model)
    )


def _why_images_run(base: nn.Module, dummy_image: DummyImage | None) -> str | None:
    """Return why the vision tower runs the images of a micro-batch without loss."""
    return _first(
        (not parts_of_tower(base), "a model without a vision tower"),
        (tower_trains(base) and dummy_image is None, "the vision tower trains, and cannot be called alone"),
    )


def _why_scored_before_training(facts: RunFacts, needed: Mapping[str, str]) -> str | None:
    """Return why old log-probabilities do not come from the first training pass."""
    args, in_pass = facts.args, ("entropies", "dependency", "logps", "shift", "values")
    cycle, random = (args.steps_per_generation or 1) * args.num_iterations, args.neftune_noise_alpha
    reader = next((needed[need] for need in in_pass if need in needed), None)
    return _why_rollout_is_spread(args) or _first(
        (args.use_vllm and args.vllm_importance_sampling_correction, "vLLM's sampling is corrected by them"),
        (args.gradient_accumulation_steps % cycle == 0, "the policy stays between generation and loss: there are none"),
        (args.replay_buffer_size > 0, "replay_buffer_size keeps them"),
        (reader, f"{reader} needs the pass anyway"),
        (random or has_active_dropout(facts.model, when_training=True), "dropout, or the noise of NEFTune"),
    )


# Reasons shared by several features


def _first(*reasons: tuple[Any, str]) -> str | None:
    """Return the first reason whose condition holds, or None."""
    return next((reason for holds, reason in reasons if holds), None)


def _why_noise(args: DAPOConfig) -> str | None:
    return "NEFTune's noise depends on the rows and columns of a pass" if args.neftune_noise_alpha else None


def _why_no_pass_shares(facts: RunFacts) -> str | None:
    if facts.args.share_prompts == "off":
        return "share_prompts=off"
    return _why_noise(facts.args) or why_adapter_reads_whole_rows(facts.model)


def _why_compiled(facts: RunFacts) -> str | None:
    return "torch.compile" if facts.compiles or is_compiled(facts.model) else None


def _why_completions_stay_whole(args: DAPOConfig) -> str | None:
    """Return why the loss of a token depends on the other tokens of its completion."""
    return _first(
        (args.importance_sampling_level == "sequence", "importance_sampling_level is sequence"),
        (args.loss_type == "vespo", "vespo weighs by the ratio of whole completions"),
        (args.off_policy_mask_threshold is not None, "off_policy_mask_threshold compares whole completions"),
    )


def _why_rollout_is_spread(args: DAPOConfig) -> str | None:
    spread = args.gradient_accumulation_steps % (args.steps_per_generation or 1)
    return "a rollout is spread over several optimizer steps" if spread else None


def find_every_token_option(args: DAPOConfig) -> str | None:
    """Return the first option that puts loss on tokens with zero advantage: a loss term or a critic."""
    return _first(
        (args.beta != 0, "beta"),
        (args.entropy_coef != 0, "entropy_coef"),
        (args.use_adaptive_entropy, "use_adaptive_entropy"),
        (args.top_entropy_quantile < 1, "top_entropy_quantile"),
        *((True, f"the loss term {name}") for name in args.terms),
        (args.has_kl_loss, "kl_coef"),
        (args.uses_critic, "advantage_estimator"),
    )


# Losses whose divisor does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
_REGROUPABLE_LOSSES = {"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"}


def why_rows_matter(facts: RunFacts, loss_type: str) -> str | None:
    """Return why a loss depends on which rows share a micro-batch, or None if it does not."""
    args = facts.args
    why = _first(
        (loss_type not in _REGROUPABLE_LOSSES, f"the loss {loss_type}"),
        (args.entropy_coef != 0 or args.use_adaptive_entropy, "the entropy term"),
        (args.top_entropy_quantile < 1.0, "top_entropy_quantile"),
        (facts.has_router_loss, "the load-balancing loss"),
        (facts.own_loss and args.most_rows_per_pass is None, "a loss of your own (without a number as rows_per_pass)"),
    )
    return why and f"{why} is taken over the tokens of a micro-batch"


def plan_dummy_image(facts: RunFacts, accelerator: Accelerator) -> DummyImage | None:
    """Build the dummy image for processes without images, or return None if none is needed."""
    base, processor = base_of(causal_model(facts.model)), getattr(facts.processor, "image_processor", None)
    alone = accelerator.num_processes == 1 and not tower_trains(base)
    reads_images = facts.has_images and facts.is_vlm and processor is not None and hasattr(base, "get_image_features")
    if alone or not reads_images or facts.compiles:
        return None
    return DummyImage(processor, accelerator, facts.is_sharded)


def plan_vision(facts: RunFacts) -> VisionCache:
    """Build a run's cache of image features, on or off."""
    base, megabytes = base_of(causal_model(facts.model)), facts.args.vision_cache_megabytes
    why = _first(
        (not facts.has_images, "data without images"),
        (megabytes == 0, "switched off"),
        (_why_compiled(facts), "torch.compile"),
        (facts.is_sharded, "sharded parameters: every process has to call the vision tower equally often"),
    )
    return VisionCache(base, megabytes, why or why_not_once(base))


def describe_sharing(features: Features, num_generations: int, passes: RowsPerPass) -> str:
    """Describe where prompts are computed once, why not elsewhere, and which micro-batches are joined.

    Args:
        num_generations: completions per prompt.
        passes: rows of a training pass.
    """
    stages: dict[str | None, list[str]] = {}
    for stage, feature in features.sharing.items():
        stages.setdefault(feature.reason, []).append(stage)
    where = [
        f"in {', '.join(names)}" if reason is None else f"not in {', '.join(names)} ({reason})"
        for reason, names in stages.items()
    ]
    sharing = f"Each prompt is computed once for its {num_generations} completions: {'; '.join(where)}."
    if not features.share_training.enabled:
        return sharing
    sharing, rows = f"{sharing}{passes}", passes.original * passes.joined
    if rows >= num_generations:
        return sharing
    parts = f"{-(-num_generations // rows)} micro-batches of {rows}"
    return f"{sharing} In training, it is computed in each of its {parts}."


def announce(run: Run, passes: RowsPerPass, idle: Mapping[str, str]) -> None:
    """Log in the main process where prompts are shared, and which options have no effect.

    Args:
        run: plans of the run.
        passes: rows of a training pass.
        idle: name of an option that is not at its default -> why it has no effect.
    """
    if not run.accelerator.is_main_process:
        return
    features, args, facts, group = run.features, run.args, run.facts, int(run.args.num_generations or 1)
    spread = describe_spread_groups(args, group, run.accelerator.num_processes)
    logger.warning(describe_sharing(features, group, passes) + spread)
    logger.info(str(features))
    is_fast = args.use_vllm or args.use_transformers_continuous_batching or args.cache_implementation
    if run.accelerator.device.type == "cuda" and not is_fast:
        logger.warning("Kernel launches slow down generation: set use_vllm, or cache_implementation=static.")
    shared = features.share_generation.enabled or features.share_training.enabled
    if shared and has_active_dropout(facts.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if facts.is_sharded and args.sync_ref_model:
        logger.warning("ZeRO-3 and FSDP save no reference of sync_ref_model: this run cannot be resumed.")
    if facts.is_vlm:
        logger.info(str(run.vision_cache))
    for name, why in idle.items():
        logger.warning(f"{name} has no effect: {why}.")


_OF_IMAGES = ("attention", "per_image", "similarity", "regions", "blind", "dependency", "shift", "views", "perception")


def plan_measurement(facts: RunFacts) -> Measurement:
    """Plan the measurements of every rollout batch.

    Raises:
        ConfigError: a feature needs a measurement that model, data or generation do not allow; it is named.
    """
    args, model, needed = facts.args, facts.model, find_needed_measurements(facts)
    ids = tuple(args.vision_token_ids or vision_token_ids(model, facts.processor))
    for need, reader in needed.items():
        if (why := why_not_measured(facts, need, ids)) is not None:
            raise ConfigError(f"{reader} cannot be used here: {why}")
    if args.compute_attention_metrics is not False and why_not_measured(facts, "attention", ids) is None:
        readers = (f"the reward {name}" for name, reward in facts.rewards.items() if may_read_columns(reward))
        needed["attention"] = next(readers, needed.get("attention", "compute_attention_metrics"))
    if args.token_weights and (last := args.token_weights_last_k_layers) is not None:
        last_layers(count_attention_layers(model), last, args.attention_segments, "token_weights_last_k_layers")
    embedded = model.config.get_text_config(decoder=True).vocab_size
    if unknown := [token for token in args.vision_token_ids or () if token >= embedded]:
        raise ConfigError(f"vision_token_ids has {unknown[0]}, but there are {embedded} tokens: give that of images.")
    read = [need for reward in facts.rewards.values() for need in needed_signals(reward) if need != BLIND_ANSWERS]
    named = named_signals(args, [*read, *["teacher_gap"] * (args.teacher_view is not None)])
    if any(signal.name == "stability" for signal in named) and not args.further_perturbations:
        raise ConfigError("The signal stability compares at least two perturbations: add further_perturbations.")
    perturbations = tuple(args.read_perturbations("dependency" in needed))
    top = int(args.teacher_view is not None and args.rollout_log_steps > 0 and not facts.is_sharded)
    top = args.teacher_top_k if "teacher_top" in needed else top
    layers = count_attention_layers(model) if "attention" in needed else 0
    samples = args.attention_rows == "auto" and args.attention_source == "scoring" and not facts.completion_maker
    special, terms = tuple(special_token_ids(facts.processor)), frozenset(args.term_needs())
    return Measurement(needed, ids, special, perturbations, args.row_views, top, named, layers, samples, terms)


def find_needed_measurements(facts: RunFacts) -> dict[str, str]:
    """Map each needed measurement to the first reward, rule, signal or option that reads it."""
    args, needed = facts.args, dict[str, str]()
    for name, reward in facts.rewards.items():
        columns, signals = needed_signal_columns(reward) - {*(facts.train_columns or ())}, needed_signals(reward)
        read = ["attention"] * bool(columns) + ["per_image"] * (PER_IMAGE in columns)
        read += ["blind"] * (BLIND_ANSWERS in signals)
        for need in (*read, *find_measurements([need for need in signals if need != BLIND_ANSWERS])):
            if is_measured_after_rewards(need):
                raise ConfigError(f"The reward {name} needs {need}, measured after it: let a signal or rule read that.")
            needed.setdefault(need, f"the reward {name}")
    for rule, need in builtin_rules(args).items():
        needed.setdefault(need, rule)
    for need, readers in args.readers().items():
        needed.setdefault("views" if need.startswith(LOGPS_PREFIX) else need, readers[0])
    for need, option, is_on in (
        ("attention", needed.get("regions", ""), "regions" in needed),
        ("attention", "compute_attention_metrics", args.compute_attention_metrics is True),
        ("logps", "kl_coef", args.penalises_kl),
        ("logps", "replay_buffer_size", args.replay_buffer_size > 0),
        ("values" if args.critic == "head" else "critic", "advantage_estimator gae", args.uses_critic),
        ("logps", "teacher_view", args.teacher_view is not None),
        ("views", "teacher_view", args.teacher_view is not None),
    ):
        if is_on:
            needed.setdefault(need, option)
    for term_need, term in args.term_needs().items():
        if (measurement := TERM_NEEDS[term_need]) is not None:
            needed.setdefault(measurement, term)
    return needed


def why_not_measured(facts: RunFacts, need: str, vision_tokens: Sequence[int]) -> str | None:
    """Return why model, data or generation do not allow a measurement, or None if they do.

    Args:
        need: name of the measurement.
        vision_tokens: placeholder tokens of images.
    """
    args, maker = facts.args, facts.completion_maker
    cache = facts.generation.get("cache_implementation")
    fixed = f"a {cache} cache" if cache in ALL_STATIC_CACHE_IMPLEMENTATIONS else None
    backend = "vLLM" if args.use_vllm else "beam search" if (facts.generation.get("num_beams") or 1) > 1 else fixed
    backend = maker or ("continuous batching" if args.use_transformers_continuous_batching else backend)
    in_generation, inside = args.attention_source == "generate", need in ("attention", "similarity")
    apart = {"regions": "regions", "per_image": "single images"}
    lacks_boxes = facts.train_columns is not None and {*BOX_COLUMNS}.isdisjoint(facts.train_columns)
    crops = need == "regions" or (need == "views" and "crop_to_box" in args.row_views.values())
    of_teacher = {TEACHER_IMAGES, PRIVILEGED_CONTEXT} & {*args.row_views.values()}
    lacking = ", ".join(of_teacher - {*(of_teacher if facts.train_columns is None else facts.train_columns)})
    why = _first(
        (maker == "rollout_func", "with rollout_func the tokens of a completion are not all the policy's answer to its "
         "prompt; switch one of the two off."),
        (maker and (need == "regions" or (need == "views" and args.row_views)),
         f"boxes and views of rows are of the prompt's images, but {maker} may add images; switch one of the two off."),
        (maker and need == "blind", f"with {maker} a blind answer could see the image; switch one of the two off."),
        (need in _OF_IMAGES and not facts.is_vlm,
         f"{type(facts.model).__name__} reads text only; use a vision-language model, or switch it off."),
        (need in _OF_IMAGES and not facts.has_images,
         "the data have no column `image` or `images`; add one, or switch it off."),
        (need in apart and in_generation,
         f'attention_source is "generate", which does not know {apart.get(need)}; use "scoring".'),
        (need == "views" and lacking, f"the data have no column {lacking}; add one, or use another view."),
        (crops and lacks_boxes,
         f"the data have neither of the columns {' and '.join(BOX_COLUMNS)}; add one, or switch it off."),
        (inside and not vision_tokens, "the placeholder token of images is not found in the model's configuration or "
         "its processor; give it as vision_token_ids."),
        (need == "attention" and in_generation and backend,
         f'attention_source is "generate" with {backend}, where it cannot be measured; use "scoring".'),
    )  # fmt: skip
    if inside and why is None and (why := why_not_measurable(facts.model)) is None and need == "similarity":
        hidden_state_number(args.hidden_similarity_layer, len(decoder_layers(find_decoder(facts.model))))
    return why
