"""Plan what passes measure, share and skip: one function per feature returns why it is off."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.utils import logging

from vgr_trl.boxes import BOX_COLUMNS
from vgr_trl.credit import builtin_rules
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.read_row import image_columns
from vgr_trl.errors import ConfigError
from vgr_trl.feature import Feature, describe_features
from vgr_trl.passes.joining import RowsPerPass, describe_spread_groups
from vgr_trl.registries import BLIND_ANSWERS, LOGPS_PREFIX, find_measurements, is_measured_after_rewards, needed_signals
from vgr_trl.rollout import ConstructedTrainer, Measurement, find_completion_maker
from vgr_trl.sharing.exactness import why_not_share, why_padding_counts
from vgr_trl.sharing.lending import why_not_lend
from vgr_trl.sharing.model_support import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    has_active_dropout,
    is_compiled,
    recomputes_without_graph,
    why_adapter_reads_whole_rows,
    why_reentrant,
)
from vgr_trl.sharing.prefix_forward import why_not_pack
from vgr_trl.sharing.shared_generate import why_not_static
from vgr_trl.signals.columns import PER_IMAGE, needed_signal_columns
from vgr_trl.signals.named import named_signals
from vgr_trl.signals.probe import (
    count_attention_layers,
    decoder_layers,
    find_decoder,
    hidden_state_number,
    why_not_measurable,
)
from vgr_trl.signals.ratios import last_layers, special_token_ids, vision_token_ids
from vgr_trl.vision.dummy_image import DummyImage
from vgr_trl.vision.feature_cache import VisionCache, parts_of_tower, tower_trains, why_not_once

_LATE = ("dependency", "shift", "views", "perception")  # what the pass over perturbed images is made for
_OF_IMAGES = ("attention", "per_image", "similarity", "regions", "blind", *_LATE)


def plan_measurement(trainer: ConstructedTrainer) -> Measurement:
    """Return what the constructed `trainer` measures of every rollout batch.

    Raises:
        ConfigError: a feature needs a measurement that model, data or generation do not allow; it is named.
    """
    args, needed = trainer.args, find_needed_measurements(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids = tuple(args.vision_token_ids or vision_token_ids(model, trainer.processing_class))
    for need, reader in needed.items():
        if (why := why_not_measured(trainer, need, ids)) is not None:
            raise ConfigError(f"{reader} cannot be used here: {why}")
    if args.compute_attention_metrics is None and why_not_measured(trainer, "attention", ids) is None:
        needed.setdefault("attention", "compute_attention_metrics")
    if args.token_weights and (last := args.token_weights_last_k_layers) is not None:
        last_layers(count_attention_layers(model), last, args.attention_segments, "token_weights_last_k_layers")
    embedded = model.config.get_text_config(decoder=True).vocab_size
    if unknown := [token for token in args.vision_token_ids or () if token >= embedded]:
        raise ConfigError(f"vision_token_ids has {unknown[0]}, but there are {embedded} tokens: give that of images.")
    of_rewards = [need for reward in trainer.reward_funcs for need in needed_signals(reward) if need != BLIND_ANSWERS]
    named = named_signals(args, of_rewards)
    if any(signal.name == "stability" for signal in named) and not args.further_perturbations:
        raise ConfigError("The signal stability compares at least two perturbations: add further_perturbations.")
    views = tuple(args.read_views("dependency" in needed))
    layers = count_attention_layers(model) if "attention" in needed else 0
    samples = args.attention_rows == "auto" and args.attention_source == "scoring" and not trainer.tools
    return Measurement(needed, ids, tuple(special_token_ids(trainer.processing_class)), views, named, layers, samples)


def find_needed_measurements(trainer: ConstructedTrainer) -> dict[str, str]:
    """Return what rewards, rules of credit, signals and other options read -> the first of them that does."""
    args, needed = trainer.args, dict[str, str]()
    data_columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if read := needed_signal_columns(reward) - data_columns:
            needed.setdefault("attention", f"the reward {name}")
            if PER_IMAGE in read:
                needed.setdefault("per_image", f"the reward {name}")
        if BLIND_ANSWERS in needed_signals(reward):
            needed.setdefault("blind", f"the reward {name}")
        for need in find_measurements([need for need in needed_signals(reward) if need != BLIND_ANSWERS]):
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
        ("perception", "perception_loss_weight", args.perception_loss_weight > 0),
        ("perception", "der_loss_weight2", args.der_loss_weight2 > 0),
    ):
        if is_on:
            needed.setdefault(need, option)
    return needed


def why_not_measured(trainer: ConstructedTrainer, need: str, vision_tokens: Sequence[int]) -> str | None:
    """Return why something cannot be measured with this model, these data and this generation; None if it can."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    maker = find_completion_maker(trainer)
    columns = getattr(trainer.train_dataset, "column_names", None)
    prepare: Any = model._prepare_generation_config  # with the model's own defaults
    options = {} if trainer.use_vllm else prepare(trainer.generation_config)[0].to_dict()
    cache = options.get("cache_implementation")
    fixed = f"a {cache} cache" if cache in ALL_STATIC_CACHE_IMPLEMENTATIONS else None
    backend = "vLLM" if trainer.use_vllm else "beam search" if (options.get("num_beams") or 1) > 1 else fixed
    backend = "continuous batching" if trainer.use_transformers_continuous_batching else backend
    in_generation, inside = args.attention_source == "generate", need in ("attention", "similarity")
    table: list[tuple[Any, str]] = [
        (maker == "rollout_func", "with rollout_func the tokens of a completion are not all the policy's answer to its "
         "prompt; switch one of the two off."),
        (maker and need == "regions", f"boxes refer to the prompt's image, but {maker} may add images; switch "
         "one of the two off."),
        (maker and need == "blind", f"with {maker} a blind answer could still see the image; switch one of "
         "the two off."),
        (maker and need == "attention" and in_generation, f'attention_source is "generate" with {maker}, which '
         'generates several times; use "scoring".'),
        (need == "per_image" and in_generation, 'attention_source is "generate", which does not tell images apart; use '
         '"scoring".'),
        (need in _OF_IMAGES and not trainer._is_vlm,
         f"{type(trainer.model).__name__} reads text only; use a vision-language model, or switch it off."),
        (need in _OF_IMAGES and not data_has_images(trainer),
         "the data have no column `image` or `images`; add one, or switch it off."),
        (need == "regions" and in_generation,
         'attention_source is "generate", which does not know regions; use "scoring".'),
        (need == "regions" and columns is not None and not set(BOX_COLUMNS) & set(columns),
         f"the data have neither of the columns {' and '.join(BOX_COLUMNS)}; add one, or switch it off."),
        (inside and not vision_tokens, "the placeholder token of images is not found in the model's configuration or "
         "its processor; give it as vision_token_ids."),
        (need == "attention" and in_generation and backend,
         f'attention_source is "generate" with {backend}, where it cannot be measured; use "scoring".'),
    ]  # fmt: skip
    why = next((sentence for wrong, sentence in table if wrong), None)
    if inside and why is None and (why := why_not_measurable(model)) is None and need == "similarity":
        hidden_state_number(args.hidden_similarity_layer, len(decoder_layers(find_decoder(model))))
    return why


def iterate_datasets(trainer: ConstructedTrainer) -> Iterator[tuple[str, Any]]:
    """The train data and every part of the eval data, with a name for messages."""
    for name, dataset in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        yield from ((name, part) for part in parts if part is not None)


def data_has_images(trainer: ConstructedTrainer) -> bool:
    """Whether the data have a column of images, or may have: they are a stream, or tools may return images."""
    return find_completion_maker(trainer) in ("environment_factory", "tools") or any(
        getattr(dataset, "column_names", None) is None or image_columns(dataset)
        for _, dataset in iterate_datasets(trainer)
    )


logger = logging.get_logger(__name__)


def plan_features(trainer: ConstructedTrainer) -> dict[str, Feature]:
    """Return what the passes of a constructed `trainer` share and skip, or why not, by name."""
    causal, training, off = causal_model(trainer.model), why_not_share_training(trainer), partial(_why_off, trainer)
    base, compiled, noise, fsdp = base_of(causal), _why_compiled(trainer), _why_noise(trainer), _why_fsdp(trainer)
    spread, rows = _why_rollout_is_spread(trainer), why_rows_matter(trainer, trainer.loss_type)
    unshared = "training does not share prompts" if training else None
    headless = "a model that is its own base" if base is causal else None
    sharded = "sharded parameters" if is_sharded(trainer) else None  # which FSDP does in `train()`
    router = "the load-balancing loss reads all tokens" if trainer.aux_loss_enabled else None
    option = find_every_token_option(trainer.args)
    read = compiled or router or (f"{option} reads all tokens" if option else None)
    accumulated, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation or 1
    cut = "optimizer steps begin within a rollout" if accumulated % generated and generated % accumulated else None

    def padding() -> str | None:
        return compiled or _why_columns_matter(trainer) or why_padding_counts(base)

    reasons = {
        "share_generation": why_not_share_generation(trainer),
        "share_scoring": _why_no_pass_shares(trainer) or compiled or why_not_share(trainer.model, gradients=False),
        "share_training": training,
        "share_over_micro_batches": unshared or sharded or why_not_lend(base),
        "join_micro_batches": off("rows_per_pass") or unshared or rows,
        "regroup": unshared or (None if trainer.args.share_prompts == "on" else rows or spread),
        "skip_zero_advantage": off("skip_zero_advantage") or noise or read,
        "skip_zero_advantage_tokens": off("skip_zero_advantage_tokens") or read or headless or _why_whole(trainer),
        "skip_padding": off("skip_padding") or router or padding(),
        "skip_head": off("skip_zero_advantage_tokens") or compiled or headless,
        "skip_images": sharded or why_not_skip_images(trainer),
        "pack_completions": off("pack_completions") or unshared or why_not_pack(base) or fsdp or padding(),
        "group_by_length": off("group_by_length") or noise or cut or rows,
        "reuse_first_pass": off("reuse_first_pass") or why_not_reuse_first_pass(trainer),
    }
    (reasons,) = broadcast_object_list([reasons])  # FSDP may have loaded the weights in the main process alone
    return {name: Feature(reason) for name, reason in reasons.items()}


def why_not_share_generation(trainer: ConstructedTrainer) -> str | None:
    """Return why completions are not generated from prompts computed once."""
    return (
        _why_no_pass_shares(trainer)
        or ("vLLM shares prompts itself" if trainer.use_vllm else None)
        or ("continuous batching" if trainer.use_transformers_continuous_batching else None)
        or _why_fsdp(trainer)
        or (why_not_static(trainer.model.config) if trainer.args.cache_implementation == "static" else None)
        or why_not_share(trainer.model, gradients=False)
    )


def why_not_share_training(trainer: ConstructedTrainer) -> str | None:
    """Return why training passes do not share prompts; wrapping and checkpointing come only in `train()`."""
    if why := _why_no_pass_shares(trainer) or _why_compiled(trainer):
        return why
    checkpointing = trainer.args.gradient_checkpointing
    under_zero3 = trainer.is_deepspeed_enabled and is_sharded(trainer)
    if _is_reentrant(trainer) and (why := why_reentrant(base_of(causal_model(trainer.model)), under_zero3)):
        return why
    if checkpointing and checkpoints_drop_caches():
        return DROPS_CACHES
    if trainer.aux_loss_enabled:
        return "the load-balancing loss needs the router of every token"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "the first version of FSDP"
    return why_not_share(trainer.model, gradients=True)


def _is_reentrant(trainer: ConstructedTrainer) -> bool:
    if not trainer.args.gradient_checkpointing:
        return recomputes_without_graph(trainer.model, when_training=True)
    options = trainer.args.gradient_checkpointing_kwargs
    return isinstance(options, dict) and bool(options.get("use_reentrant", False))


def why_not_skip_images(trainer: ConstructedTrainer) -> str | None:
    """Return why the images of a micro-batch without loss run."""
    base = base_of(causal_model(trainer.model))
    if not parts_of_tower(base):
        return "a model without a vision tower"
    if tower_trains(base) and trainer.dummy_image is None:
        return "the vision tower trains, and cannot be called alone"
    return None


def why_not_reuse_first_pass(trainer: ConstructedTrainer) -> str | None:
    """Return why old log-probabilities do not come from the first training pass."""
    args, needed = trainer.args, trainer.measurement.needed
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return "the correction of vLLM's sampling compares with them"
    if args.gradient_accumulation_steps % ((args.steps_per_generation or 1) * args.num_iterations) == 0:
        return "there are none, as the policy does not change between generation and loss"
    if why := _why_rollout_is_spread(trainer):
        return why
    if args.replay_buffer_size > 0:
        return "replay_buffer_size keeps them"
    for need in ("entropies", "dependency", "logps", "shift", "values"):
        if need in needed:
            return f"{needed[need]} needs the pass anyway"
    random = args.neftune_noise_alpha or has_active_dropout(trainer.model, when_training=True)
    return "dropout, or the noise of NEFTune" if random else None


# Reasons that several features have


def _why_off(trainer: ConstructedTrainer, name: str) -> str | None:
    return f"{name}=off" if getattr(trainer.args, name) == "off" else None


def _why_noise(trainer: ConstructedTrainer) -> str | None:
    return "NEFTune's noise depends on the rows and columns of a pass" if trainer.args.neftune_noise_alpha else None


def _why_no_pass_shares(trainer: ConstructedTrainer) -> str | None:
    return _why_off(trainer, "share_prompts") or _why_columns_matter(trainer)


def _why_columns_matter(trainer: ConstructedTrainer) -> str | None:
    return _why_noise(trainer) or why_adapter_reads_whole_rows(trainer.model)


def _why_compiled(trainer: ConstructedTrainer) -> str | None:
    return "torch.compile" if _compiles(trainer) or is_compiled(trainer.model) else None


def _why_fsdp(trainer: ConstructedTrainer) -> str | None:
    return "FSDP" if trainer.is_fsdp_enabled else None


def _why_whole(trainer: ConstructedTrainer) -> str | None:
    """Return why the loss of a token depends on the other tokens of its completion."""
    if trainer.importance_sampling_level == "sequence":
        return "importance_sampling_level is sequence, a ratio of whole completions"
    if trainer.loss_type == "vespo":
        return "vespo weighs by the ratio of whole completions"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold compares whole completions"
    return None


def _why_rollout_is_spread(trainer: ConstructedTrainer) -> str | None:
    spread = trainer.args.gradient_accumulation_steps % (trainer.args.steps_per_generation or 1)
    return "a rollout is spread over several optimizer steps" if spread else None


def find_every_token_option(args: DAPOConfig) -> str | None:
    """Return the first option that puts loss on zero-advantage tokens: a term of the loss, or a critic."""
    options = {
        "beta": args.beta != 0,
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "use_entropy_penalty": args.use_entropy_penalty,
        "perception_loss_weight": args.perception_loss_weight > 0,
        "der_loss_weight1": args.der_loss_weight1 > 0,
        "der_loss_weight2": args.der_loss_weight2 > 0,
        "kl_coef": args.has_kl_loss,
        "advantage_estimator": args.uses_critic,
    }
    return next((name for name, is_on in options.items() if is_on), None)


# Losses that divide by something that does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
_REGROUPABLE_LOSSES = {"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"}


def why_rows_matter(trainer: ConstructedTrainer, loss_type: str) -> str | None:
    """Return why a loss depends on which rows share a micro-batch; None if it does not."""
    if loss_type not in _REGROUPABLE_LOSSES:
        return f"the loss {loss_type} divides by the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy term is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile is taken over the tokens of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the load-balancing loss is taken over the tokens of a micro-batch"
    return None


def plan_dummy_image(trainer: ConstructedTrainer, has_images: bool) -> DummyImage | None:
    """Return what takes part in the vision tower where no image of a process does; None: nothing need, or can."""
    base = base_of(causal_model(trainer.model))
    processor = getattr(trainer.processing_class, "image_processor", None)
    alone = trainer.accelerator.num_processes == 1 and not tower_trains(base)
    reads_images = has_images and trainer._is_vlm and processor is not None and hasattr(base, "get_image_features")
    if alone or not reads_images or _compiles(trainer):
        return None
    return DummyImage(processor, trainer.accelerator, is_sharded(trainer))


def plan_vision(trainer: ConstructedTrainer, has_images: bool) -> VisionCache:
    """Return the cache of image features of a constructed `trainer`, on or off.

    Args:
        has_images: whether its data have images.
    """
    base, megabytes = base_of(causal_model(trainer.model)), trainer.args.vision_cache_megabytes
    reasons = {
        "data without images": not has_images,
        "switched off": megabytes == 0,
        "torch.compile": _why_compiled(trainer),
        "sharded parameters: every process has to call the vision tower equally often": is_sharded(trainer),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return VisionCache(base, megabytes, why or why_not_once(base))


def _compiles(trainer: ConstructedTrainer) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def is_sharded(trainer: ConstructedTrainer) -> bool:
    """Whether a process has only parts of the parameters, under FSDP and ZeRO-3."""
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


def describe_sharing(features: Mapping[str, Feature], num_generations: int, passes: RowsPerPass) -> str:
    """Return where prompts are computed once, why not elsewhere, and which micro-batches are joined."""
    stages: dict[str | None, list[str]] = {}
    for stage in ("generation", "scoring", "training"):
        stages.setdefault(features[f"share_{stage}"].reason, []).append(stage)
    where = [
        f"in {', '.join(names)}" if reason is None else f"not in {', '.join(names)} ({reason})"
        for reason, names in stages.items()
    ]
    sharing = f"Each prompt is computed once for its {num_generations} completions: {'; '.join(where)}."
    if not features["share_training"].enabled:
        return sharing
    sharing, rows = f"{sharing}{passes}", passes.given * passes.joined
    if rows >= num_generations:
        return sharing
    parts, over = f"{-(-num_generations // rows)} micro-batches of {rows}", features["share_over_micro_batches"]
    if over.enabled:
        return f"{sharing} In training, one pass over a prompt serves its {parts}."
    return f"{sharing} In training, it is computed in each of its {parts} ({over.reason})."


def warn_of_slow_generation(args: DAPOConfig, device: str) -> str | None:
    """Return what generation by transformers costs on a GPU as it comes; None where it is not used."""
    engine = args.use_vllm or args.use_transformers_continuous_batching
    if device != "cuda" or engine or args.cache_implementation is not None:
        return None
    cure = "set use_vllm, or cache_implementation=static, with which a 7B takes 1.7 s for 128 tokens, not 5.1 s"
    return f"Kernel launches slow down generation by transformers: {cure}."


def announce(trainer: ConstructedTrainer) -> None:
    """Log in the main process where prompts are shared, and which options have no effect."""
    if not trainer.accelerator.is_main_process:
        return
    features, group = trainer.features, trainer.num_generations
    spread = describe_spread_groups(trainer.args, group, trainer.accelerator.num_processes)
    logger.warning(describe_sharing(features, group, trainer.rows_per_pass) + spread)
    logger.info(describe_features(features))
    if features["share_training"].enabled and _is_reentrant(trainer):
        logger.warning("Passes that share prompts recompute layers with use_reentrant=False, plain ones with True.")
    if warning := warn_of_slow_generation(trainer.args, trainer.accelerator.device.type):
        logger.warning(warning)
    shared = features["share_generation"].enabled or features["share_training"].enabled
    if shared and has_active_dropout(trainer.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if trainer._is_vlm:
        logger.info(str(trainer.vision_cache))
    for name, why in trainer.idle_options.items():
        logger.warning(f"{name} has no effect: {why}.")
