"""Plan the measurements of a rollout; refuse measurements that model, data or generation do not allow."""

from collections.abc import Sequence
from typing import Any

from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from vgr_trl.boxes import BOX_COLUMNS
from vgr_trl.credit import builtin_rules
from vgr_trl.errors import ConfigError
from vgr_trl.registries import BLIND_ANSWERS, LOGPS_PREFIX, find_measurements, is_measured_after_rewards, needed_signals
from vgr_trl.rollout import Measurement
from vgr_trl.run_facts import RunFacts
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

_LATE = ("dependency", "shift", "views", "perception")  # measured by the pass over perturbed images
_OF_IMAGES = ("attention", "per_image", "similarity", "regions", "blind", *_LATE)


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
    if args.compute_attention_metrics is None and why_not_measured(facts, "attention", ids) is None:
        needed.setdefault("attention", "compute_attention_metrics")
    if args.token_weights and (last := args.token_weights_last_k_layers) is not None:
        last_layers(count_attention_layers(model), last, args.attention_segments, "token_weights_last_k_layers")
    embedded = model.config.get_text_config(decoder=True).vocab_size
    if unknown := [token for token in args.vision_token_ids or () if token >= embedded]:
        raise ConfigError(f"vision_token_ids has {unknown[0]}, but there are {embedded} tokens: give that of images.")
    read = [need for reward in facts.rewards.values() for need in needed_signals(reward) if need != BLIND_ANSWERS]
    named = named_signals(args, read)
    if any(signal.name == "stability" for signal in named) and not args.further_perturbations:
        raise ConfigError("The signal stability compares at least two perturbations: add further_perturbations.")
    views = tuple(args.read_views("dependency" in needed))
    layers = count_attention_layers(model) if "attention" in needed else 0
    samples = args.attention_rows == "auto" and args.attention_source == "scoring" and not facts.tools
    return Measurement(needed, ids, tuple(special_token_ids(facts.processor)), views, named, layers, samples)


def find_needed_measurements(facts: RunFacts) -> dict[str, str]:
    """Return the measurements that are needed, each with the first reward, rule, signal or option that reads it."""
    args, needed = facts.args, dict[str, str]()
    for name, reward in facts.rewards.items():
        if read := needed_signal_columns(reward) - {*(facts.train_columns or ())}:
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


def why_not_measured(facts: RunFacts, need: str, vision_tokens: Sequence[int]) -> str | None:
    """Return why a measurement cannot be made with this model, these data and this generation, or None if it can.

    Args:
        need: name of the measurement.
        vision_tokens: placeholder tokens of images.
    """
    args, maker = facts.args, facts.completion_maker
    cache = facts.generation.get("cache_implementation")
    fixed = f"a {cache} cache" if cache in ALL_STATIC_CACHE_IMPLEMENTATIONS else None
    backend = "vLLM" if facts.use_vllm else "beam search" if (facts.generation.get("num_beams") or 1) > 1 else fixed
    backend = "continuous batching" if args.use_transformers_continuous_batching else backend
    in_generation, inside = args.attention_source == "generate", need in ("attention", "similarity")
    lacks_boxes = facts.train_columns is not None and {*BOX_COLUMNS}.isdisjoint(facts.train_columns)
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
        (need in _OF_IMAGES and not facts.is_vlm,
         f"{type(facts.model).__name__} reads text only; use a vision-language model, or switch it off."),
        (need in _OF_IMAGES and not facts.has_images,
         "the data have no column `image` or `images`; add one, or switch it off."),
        (need == "regions" and in_generation,
         'attention_source is "generate", which does not know regions; use "scoring".'),
        (need == "regions" and lacks_boxes,
         f"the data have neither of the columns {' and '.join(BOX_COLUMNS)}; add one, or switch it off."),
        (inside and not vision_tokens, "the placeholder token of images is not found in the model's configuration or "
         "its processor; give it as vision_token_ids."),
        (need == "attention" and in_generation and backend,
         f'attention_source is "generate" with {backend}, where it cannot be measured; use "scoring".'),
    ]  # fmt: skip
    why = next((sentence for wrong, sentence in table if wrong), None)
    if inside and why is None and (why := why_not_measurable(facts.model)) is None and need == "similarity":
        hidden_state_number(args.hidden_similarity_layer, len(decoder_layers(find_decoder(facts.model))))
    return why
