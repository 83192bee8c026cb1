"""What a run has to measure, and whether it can."""

from typing import Any

from vgr_trl.credit.rules import active_rules
from vgr_trl.data.rows.regions import COLUMNS
from vgr_trl.errors import ConfigError
from vgr_trl.registries import BLIND_ANSWERS, MEASUREMENTS, VIEW, is_late, measurements, needs_of
from vgr_trl.signals import Measurement, Wanted
from vgr_trl.signals.decoder import count_attention_layers, find_decoder, why_not_measurable
from vgr_trl.signals.modality import special_token_ids, vision_token_ids
from vgr_trl.signals.named import NamedSignal, named_signals
from vgr_trl.signals.reward_columns import columns_needed_by
from vgr_trl.signals.similarity import decoder_layers, hidden_state_number
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.start.prepare import data_has_images


def plan_measurement(trainer: ConstructedTrainer) -> Measurement:
    """Return what the constructed `trainer` measures of every rollout batch.

    Raises:
        ConfigError: a feature needs a measurement that model, data or generation do not allow; it is named.
    """
    args = trainer.args
    features = _readers(trainer)
    attention = features["attention"]
    perceiving = (
        features["dependency"]
        + features["shift"]
        + features["views"]
        + _on(args.perception_loss_weight > 0, "perception_loss_weight")
        + _on(args.der_loss_weight2 > 0, "der_loss_weight2")
    )
    scored = features["entropies"] + features["logps"] + _on(args.uses_critic, "advantage_estimator gae")
    blind = _blind_readers(trainer)
    seeing = attention + features["similarity"]
    _refuse(seeing + scored + perceiving + blind, _why_no_rollout(trainer))
    _refuse(seeing + perceiving + blind, _why_no_images(trainer))
    _refuse(features["regions"], _why_no_regions(trainer))
    ids = tuple(args.vision_token_ids or ()) or _found_vision_tokens(trainer)
    _refuse_unknown_tokens(trainer)
    if features["similarity"]:
        _refuse(features["similarity"], _why_no_similarity(trainer, ids))
    if attention:
        _refuse(attention, _why_no_attention(trainer, ids))
        _refuse_missing_layers(trainer)
    elif args.compute_attention_metrics is None and _measurable(trainer, ids):
        features["attention"] = ("compute_attention_metrics",)
    return Measurement(
        Wanted(**features),
        ids,
        tuple(special_token_ids(trainer.processing_class)),
        attention_source=args.attention_source,
        attention_segments=args.attention_segments,
        similarity_layer=args.hidden_similarity_layer,
        similarity_over=args.hidden_similarity_over,
        views=tuple(args.read_views(bool(features["dependency"]))),
        named=_named(trainer),
        blind=bool(blind),
    )


def _named(trainer: ConstructedTrainer) -> tuple[NamedSignal, ...]:
    found = named_signals(trainer.args, [need for reward in trainer.reward_funcs for need in _signals_of(reward)])
    if any(signal.name == "stability" for signal in found) and not trainer.args.further_perturbations:
        raise ConfigError("The signal stability compares perturbations: name others as further_perturbations.")
    return found


def _signals_of(reward: Any) -> list[str]:
    return [need for need in needs_of(reward) if need != BLIND_ANSWERS]


def _readers(trainer: ConstructedTrainer) -> dict[str, tuple[str, ...]]:
    """Measurement -> what needs it: rewards, rules of credit, signals, other options."""
    data_columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    args = trainer.args
    found: dict[str, list[str]] = {name: [] for name in MEASUREMENTS}
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if columns_needed_by(reward) - data_columns:
            found["attention"].append(f"the reward {name}")
        for need in measurements(_signals_of(reward)):
            if is_late(need):
                raise ConfigError(
                    f"The reward {name} needs {need}, measured after the rewards: let a signal or rule read it."
                )
            found[need].append(f"the reward {name}")
    for rule in active_rules(args):
        for need in () if rule.is_plugin else rule.needs:
            found[need].append(rule.switch)
    for need, readers in args.readers().items():
        found["views" if need.startswith(VIEW) else need] += readers
    found["attention"] += found["regions"]
    found["attention"] += _on(args.compute_attention_metrics is True, "compute_attention_metrics")
    found["logps"] += _on(args.penalises_kl, "kl_coef")
    found["values"] = list(_on(args.uses_critic and args.critic == "head", "advantage_estimator gae"))
    return {name: tuple(readers) for name, readers in found.items()}


def _blind_readers(trainer: ConstructedTrainer) -> tuple[str, ...]:
    pairs = zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
    return tuple(f"the reward {name}" for name, reward in pairs if BLIND_ANSWERS in needs_of(reward))


def _on(value: bool, name: str) -> tuple[str, ...]:
    return (name,) if value else ()


def _refuse(features: tuple[str, ...], why: str | None) -> None:
    if features and why is not None:
        raise ConfigError(f"{features[0]} cannot be used here: {why}")


def _why_no_rollout(trainer: ConstructedTrainer) -> str | None:
    for name in ("rollout_func", "tools", "environment_factories"):
        if getattr(trainer, name, None):
            return (
                f"with {name.removesuffix('_factories')} the tokens of a completion are not all the policy's answer to "
                "its prompt; switch one of the two off."
            )
    return None


def _why_no_images(trainer: ConstructedTrainer) -> str | None:
    if not trainer._is_vlm:
        return f"{type(trainer.model).__name__} reads text only; use a vision-language model, or switch it off."
    if not data_has_images(trainer):
        return "the data have no column `image` or `images`; add one, or switch it off."
    return None


def _why_no_regions(trainer: ConstructedTrainer) -> str | None:
    if trainer.args.attention_source == "generate":
        return 'attention_source is "generate", which does not know regions; use "scoring".'
    columns = getattr(trainer.train_dataset, "column_names", None)
    if columns is not None and not set(COLUMNS) & set(columns):
        return f"the data have neither of the columns {' and '.join(COLUMNS)}; add one, or switch it off."
    return None


def _refuse_missing_layers(trainer: ConstructedTrainer) -> None:
    last = trainer.args.token_weights_last_k_layers
    layers = count_attention_layers(trainer.accelerator.unwrap_model(trainer.model))
    if trainer.args.token_weights and last is not None and last > layers:
        raise ConfigError(
            f"token_weights_last_k_layers is {last}, but {layers} layers of the model have attention: give a number in "
            f"[1, {layers}], or None for the late segment."
        )


def _refuse_unknown_tokens(trainer: ConstructedTrainer) -> None:
    config = trainer.accelerator.unwrap_model(trainer.model).config
    embedded = config.get_text_config(decoder=True).vocab_size
    for token in trainer.args.vision_token_ids or ():
        if token >= embedded:
            raise ConfigError(
                f"vision_token_ids has {token}, but the model has {embedded} tokens: give the placeholder of images."
            )


def _found_vision_tokens(trainer: ConstructedTrainer) -> tuple[int, ...]:
    return tuple(vision_token_ids(trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class))


def _why_no_similarity(trainer: ConstructedTrainer, ids: tuple[int, ...]) -> str | None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    why = _why_no_vision_tokens(ids) or why_not_measurable(model)
    if why is None:
        hidden_state_number(trainer.args.hidden_similarity_layer, len(decoder_layers(find_decoder(model))))
    return why


def _why_no_vision_tokens(ids: tuple[int, ...]) -> str | None:
    if ids:
        return None
    return (
        "the placeholder token of images is not found in the model's configuration or its processor; give it as "
        "vision_token_ids."
    )


def _why_no_attention(trainer: ConstructedTrainer, ids: tuple[int, ...]) -> str | None:
    if (why := _why_no_vision_tokens(ids)) is not None:
        return why
    if trainer.args.attention_source == "generate":
        for on, backend in (
            (trainer.use_vllm, "vLLM"),
            (trainer.use_transformers_continuous_batching, "continuous batching"),
            ((getattr(getattr(trainer, "generation_config", None), "num_beams", None) or 1) > 1, "beam search"),
        ):
            if on:
                return f'attention_source is "generate" with {backend}, which keeps no attention; use "scoring".'
    return why_not_measurable(trainer.accelerator.unwrap_model(trainer.model))


def _measurable(trainer: ConstructedTrainer, ids: tuple[int, ...]) -> bool:
    reasons = (_why_no_rollout(trainer), _why_no_images(trainer), _why_no_attention(trainer, ids))
    return all(reason is None for reason in reasons)
