"""Plan the measurements of rollouts, and score completions and perturbed views for them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch.nn import functional

from vgr_trl.boxes import BOX_COLUMNS, Box, boxes_of
from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.credit import builtin_rules
from vgr_trl.data.read_row import image_columns
from vgr_trl.efficiency.loss_mask import find_window, take_rows, trim_inputs
from vgr_trl.patches.trl import mark_images
from vgr_trl.pixels import image_inputs_of, image_tensors, joined, parts_by_counts, tiles_by_tokens
from vgr_trl.registries import BLIND_ANSWERS, LOGPS_PREFIX, find_measurements, is_measured_after_rewards, needed_signals
from vgr_trl.rollout import ConstructedTrainer, Rollout, describe_row
from vgr_trl.rows import (
    build_scoring_inputs,
    pixels_of_rows,
    rows_with_images,
    scoring_inputs,
    stacked_inputs,
    text_inputs,
    valid_tokens,
)
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.sharing import whole_groups
from vgr_trl.signals.named import (
    PER_IMAGE,
    SIGNAL_COLUMNS,
    SINGLE_COLUMNS,
    NamedSignal,
    RolloutSignals,
    add_named,
    attention_metrics,
    build_unmeasured_signals,
    named_columns,
    named_metrics,
    named_signals,
    needed_signal_columns,
    reward_columns,
)
from vgr_trl.signals.perturbation import Perturb, derive_seed, drop_images, images_in, perturb_images, perturbed_prompts
from vgr_trl.signals.probe import (
    count_attention_layers,
    decoder_layers,
    find_decoder,
    hidden_state_number,
    why_not_measurable,
)
from vgr_trl.signals.ratios import (
    AttentionMass,
    drawn,
    late_layers,
    lit_share,
    measure_segments,
    select_region,
    special_token_ids,
    token_shares,
    vision_token_ids,
    visual_dependency,
)
from vgr_trl.signals.scoring import AttentionPlan, Head, Scores, Want, given_tokens
from vgr_trl.turns import perturb_turns, process_images, rows_perturbed
from vgr_trl.utils import ConfigError

MOST_KEPT = 2**29  # bytes of device memory for attention kept token by token; 10 rows of 1,024 tokens of a 7 B model
_LATE = ("dependency", "shift", "views", "perception")  # what the pass over perturbed images is made for
_OF_IMAGES = ("attention", "per_image", "similarity", "regions", "blind", *_LATE)


@dataclass(frozen=True)
class Measurement:
    """Measurements of every rollout batch.

    Attributes:
        needed: name of a measurement -> the first option, reward or rule that needs it. `shift` is how distributions
            differ under the perturbation, `views` log-probabilities under perturbations, `regions` attention on what
            the question is about, `per_image` attention on each image, `values` those of a critic's head, `blind`
            answers without the image, `perception` perturbed images for the loss.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        views: perturbations under which completions are scored.
        named: signals that are asked for by name, or read by plug-ins.
        layers: of the model, those that have attention; 0 where attention is not measured.
        samples_curves: whether attention that only metrics read is measured for a sample.
    """

    needed: Mapping[str, str]
    vision_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    views: tuple[str, ...] = ()
    named: tuple[NamedSignal, ...] = ()
    layers: int = 0
    samples_curves: bool = False

    def needs(self, *names: str) -> bool:
        """Whether any of these is needed."""
        return not self.needed.keys().isdisjoint(names)

    @property
    def head(self) -> bool:
        """Whether a pass through the model's head is needed, for log-probabilities or entropies."""
        return self.needs("entropies", "dependency", "shift", "logps")

    @property
    def scoring(self) -> bool:
        """Whether a pass over the rollout batch is needed."""
        return self.head or self.needs("attention", "similarity", "values")

    @property
    def samples(self) -> bool:
        """Whether training rollouts are scored for the attention metrics alone, so that a sample is enough."""
        only_curves = self.needed.get("attention") == "compute_attention_metrics" and not self.named
        return self.samples_curves and only_curves and not (self.head or self.needs("similarity", "values"))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rewards get beside those of the data."""
        of_attention = (*SIGNAL_COLUMNS, "mdi_balance_ratio") if "attention" in self.needed else ()
        answers = (BLIND_ANSWERS,) if "blind" in self.needed else ()
        return (*of_attention, *answers, *(signal.name for signal in self.named if not signal.is_late))


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
    last = args.token_weights_last_k_layers
    if args.token_weights and last is not None and last > (count := count_attention_layers(model)):
        raise ConfigError(
            f"token_weights_last_k_layers is {last}, but {count} layers of the model have attention: give a number in "
            f"[1, {count}], or None for the late segment."
        )
    embedded = model.config.get_text_config(decoder=True).vocab_size
    if unknown := [token for token in args.vision_token_ids or () if token >= embedded]:
        raise ConfigError(
            f"vision_token_ids has {unknown[0]}, but the model has {embedded} tokens: give the placeholder of images."
        )
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
                raise ConfigError(
                    f"The reward {name} needs {need}, measured after the rewards: let a signal or rule read it."
                )
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


def find_completion_maker(trainer: ConstructedTrainer) -> str | None:
    """Return the option by which completions are more than the policy's answer to its prompt, if one is on."""
    makers = {"rollout_func": "rollout_func", "environment_factories": "environment_factory", "tools": "tools"}
    return next((option for name, option in makers.items() if getattr(trainer, name, None)), None)


def why_not_measured(trainer: ConstructedTrainer, need: str, vision_tokens: Sequence[int]) -> str | None:
    """Return why something cannot be measured with this model, these data and this generation; None if it can."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    maker = find_completion_maker(trainer)
    columns = getattr(trainer.train_dataset, "column_names", None)
    beams = getattr(getattr(trainer, "generation_config", None), "num_beams", None) or 1
    backends = {
        "vLLM": trainer.use_vllm,
        "continuous batching": trainer.use_transformers_continuous_batching,
        "beam search": beams > 1,
    }
    backend = next((name for name, is_on in backends.items() if is_on), None)
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
         f'attention_source is "generate" with {backend}, which keeps no attention; use "scoring".'),
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


def completion_inputs(trainer: ConstructedTrainer, rollout: Rollout, completion_ids: list[list[int]]) -> dict[str, Any]:
    """Return the inputs of the scoring pass over a rollout whose batch TRL has not built yet."""
    end_tokens = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    prompts, turns = rollout.prompts, rollout.turns
    if turns is not None and turns.fields:
        prompts = replace(prompts, images=turns.images, fields=turns.fields)
    inputs = build_scoring_inputs(
        prompts,
        completion_ids,
        pad_token_id=trainer._tokenizer.pad_token_id,
        vision_token_ids=trainer.measurement.vision_token_ids,
        valid=[ids[-1] in end_tokens for ids in completion_ids] if trainer.args.mask_truncated_completions else None,
        own=None if turns is None else turns.own,
        pad_to_multiple_of=trainer.pad_to_multiple_of or None,
    )
    if turns is not None and turns.fields:
        inputs = mark_images(trainer.model, inputs["input_ids"], inputs)
    return inputs


def wanted_scores(
    trainer: ConstructedTrainer, rollout: Rollout, inputs: Mapping[str, Any], recorded: Sequence[int] | None = None
) -> Want:
    """Return what the scoring pass over a rollout has to give for everything that reads its signals.

    Args:
        recorded: rows of `inputs` that are recorded; None: those of the rollout.
    """
    args, measurement = trainer.args, trainer.measurement
    ids, length = inputs["input_ids"], inputs["logits_to_keep"]
    attention, similarity = None, None
    if measurement.needs("similarity"):
        similarity = args.hidden_similarity_layer, args.hidden_similarity_over
    measures = measurement.needs("attention") and (rollout.generated is None or bool(rollout.recorded))
    if measures or similarity is not None:
        late = late_layers(measurement.layers, args.attention_segments) if measures else []
        vision = torch.isin(ids, torch.tensor(measurement.vision_token_ids, device=ids.device))  # (N, P + T)
        vision &= given_tokens(inputs, inputs.get("tool_mask"))
        attention = AttentionPlan(
            measurement.vision_token_ids,
            measurement.special_token_ids,
            mass=measures,
            region=region_mask(trainer, rollout, ids[:, :-length]) if measures else None,
            keep_rows=_limit_kept_rows(vision, length * len(late), recorded or rollout.recorded or ()),
            keep_layers=late,
            measure_prompt=rollout.generated is None,
            similarity=similarity,
            per_image=measurement.needs("per_image"),
        )
    return Want(
        entropies=True,
        hidden=(trainer.kl.full is not None and trainer.kl.penalises) or measurement.needs("shift"),
        values=None if trainer.critic is None else trainer.critic.head,
        attention=attention,
    )


def make_signals(scores: Scores, generated: RolloutSignals | None) -> RolloutSignals:
    """Return the signals of a rollout, with the attention that was measured in generation where there is some."""
    mass = scores.attention if generated is None else pad_signals(generated, scores.mask).attention
    assert scores.entropies is not None
    return RolloutSignals(
        scores.logps.float(), scores.entropies.float(), scores.mask, mass, similarity=scores.similarity
    )


def _limit_kept_rows(vision: torch.Tensor, queries: int, rows: Sequence[int]) -> list[int]:
    """Return the first of `rows` whose attention, token by token, fits into `MOST_KEPT` bytes together.

    Args:
        vision: (N, P + T) bool, vision tokens.
        queries: of a row, those of every layer counted.
    """
    fitting, used = [], 0
    for row in rows:
        size = 4 * queries * int(vision[row].sum())
        if used + size <= MOST_KEPT:
            fitting.append(row)
            used += size
    return fitting


def pad_signals(generated: RolloutSignals, mask: torch.Tensor) -> RolloutSignals:
    """Return signals of T' tokens for the T tokens of `mask`, (N, T): padded with zeros, or cut."""
    mass, mask = generated.attention, mask.to(generated.mask.device)
    assert mass is not None
    missing = mask.size(1) - generated.mask.size(1)  # the longest completion may have been cut or padded
    values = generated.logps, generated.entropies, mass.vision, mass.instruction
    logps, entropies, vision, instruction = (functional.pad(each, (0, missing)) * mask for each in values)
    return RolloutSignals(logps, entropies, mask, replace(mass, vision=vision, instruction=instruction, mask=mask))


def signals_as_columns(trainer: ConstructedTrainer, rollout: Rollout) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the columns that rewards get of the signals of a rollout, and its metrics; empty if there are none."""
    args, signals, gather = trainer.args, rollout.signals, trainer.accelerator.gather
    assert signals is not None
    new = add_named(trainer.measurement.named, signals)
    columns: dict[str, list[Any]] = {**named_columns(new, signals)}
    metrics = named_metrics(new, signals, gather)
    if signals.attention is None:
        return columns, metrics
    prompt_mass = None if rollout.scores is None else rollout.scores.prompt_attention
    of_attention, more = attention_columns(trainer, signals.attention, prompt_mass)
    columns |= of_attention | {"mdi_balance_ratio": [args.mdi_balance_ratio] * len(rollout.rows)}
    if rollout.scores is not None and rollout.scores.per_image is not None:
        columns |= {PER_IMAGE: rollout.scores.per_image}
    return columns, more | metrics


def attention_columns(
    trainer: ConstructedTrainer, mass: AttentionMass | None, prompt_mass: AttentionMass | None
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the `SIGNAL_COLUMNS` of completions, and the metrics of those of all processes."""
    assert mass is not None
    segmentation = trainer.args.attention_segments, trainer.args.mdi_balance_ratio
    segments = measure_segments(mass, *segmentation)
    of_prompt = None if prompt_mass is None else measure_segments(prompt_mass, *segmentation)
    return reward_columns(segments), attention_metrics(segments, trainer.accelerator.gather, of_prompt)


# Attention that only metrics read: of a sample of the rows


def keep_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state behind this block, in which dropout draws from it.

    For passes that only metrics, records and checks read. A resumed run makes more of them than a run that went on, and
    has to draw the same numbers for training.
    """
    return torch.random.fork_rng([device] * (device.type != "cpu"))


def choose_sample(rows: int, size: int, first: int, recorded: Sequence[int], draw: int) -> list[int]:
    """Return rows of this process: the recorded ones, and those of one group, that of the first recorded one if any.

    Args:
        rows: completions of this process.
        size: G.
        first: number of the first row among those of all processes.
        recorded: rows that are recorded.
        draw: at least 0; it chooses the group where nothing is recorded.
    """
    group = (first + (recorded[0] if recorded else draw % rows)) // size
    return sorted({*recorded, *(row for row in range(rows) if (first + row) // size == group)})


def measure_sample(
    trainer: ConstructedTrainer, rollout: Rollout, completion_ids: list[list[int]]
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Measure the attention of a sample of a rollout's rows; return its columns, None for other rows, and metrics.

    The signals of other rows are NaN. Every process measures equally many rows, as sharded parameters demand.
    """
    args, accelerator, count = trainer.args, trainer.accelerator, len(completion_ids)
    first, draw = accelerator.process_index * count, derive_seed(args.seed, trainer.state.global_step, 0)
    rows = choose_sample(count, trainer.completions_per_prompt, first, rollout.recorded or (), draw)
    most = int(accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).max())
    rows = sorted([*rows, *(row for row in range(count) if row not in rows)][:most])
    inputs = completion_inputs(trainer, rollout, completion_ids)
    mask = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].bool()
    written = torch.tensor([[len(completion_ids[row])] for row in rows]) > torch.arange(mask.size(1))  # (rows, T)
    prompts, multiple = inputs["attention_mask"][rows, : -mask.size(1)], trainer.pad_to_multiple_of or None
    window = replace(find_window(written, prompts, rows=False, padding=True, multiple=multiple), rows=rows)
    part = trim_inputs(inputs, window)
    recorded = [rows.index(row) for row in rollout.recorded or ()]
    with keep_random_state(accelerator.device):
        scores = trainer.score(part, wanted_scores(trainer, rollout, part, recorded))
    rollout.signals = _spread(make_signals(scores, None), rows, mask)
    maps = {rows[row]: kept for row, kept in (scores.maps or {}).items()}
    rollout.scores = Scores(rollout.signals.logps, rollout.signals.mask, maps=maps)
    columns, metrics = attention_columns(trainer, scores.attention, scores.prompt_attention)
    places = {row: place for place, row in enumerate(rows)}
    found = {
        name: [columns[name][places[row]] if row in places else None for row in range(count)] for name in SINGLE_COLUMNS
    }
    return found, metrics


def _spread(signals: RolloutSignals, rows: Sequence[int], mask: torch.Tensor) -> RolloutSignals:
    """Return the signals of some rows, of fewer columns, as those of all rows of `mask`, (N, T); NaN elsewhere."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        every = values.new_full((*values.shape[:-2], *mask.shape), torch.nan)
        every[..., rows, : values.size(-1)] = values
        return every

    mask, mass = mask.to(signals.mask.device), signals.attention
    found = RolloutSignals(spread(signals.logps), spread(signals.entropies), mask)
    if mass is not None:
        index = torch.tensor(rows, device=mask.device)
        vision, instruction = (
            value.new_zeros(len(mask)).index_copy(0, index, value) for value in (mass.num_vision, mass.num_instruction)
        )
        found.attention = AttentionMass(spread(mass.vision), spread(mass.instruction), vision, instruction, mask)
    return found


# The pass of a rollout over perturbed images: what its completions depend on the original ones for


def score_perturbed(trainer: ConstructedTrainer, rollout: Rollout) -> None:
    """Score the completions given perturbed images; the rollout gets their dependency among its signals.

    Pixels are kept for the rows of one pass only. Where the perception loss is on, the batch gets those of all rows as
    `perturbed_pixel_values`.
    """
    args, batch, measurement = trainer.args, rollout.batch, trainer.measurement
    every = range(len(batch["prompt_ids"]))
    if "perception" in measurement.needed:
        pixels = _inputs_under(args.perturbation, trainer, rollout, every).get("pixel_values")
        batch |= {} if pixels is None else {"perturbed_pixel_values": pixels}
    if not measurement.views:
        return
    rollout.signals = signals = rollout.signals or build_unmeasured_signals(valid_tokens(batch).bool())
    size = whole_groups(args.per_device_train_batch_size, trainer.completions_per_prompt)
    parts = [
        trainer.score(
            stacked_inputs([_inputs_under(name, trainer, rollout, rows) for name in measurement.views]),
            Want(hidden=measurement.needs("shift")),
        )
        for rows in (every[start : start + size] for start in every[::size])
    ]
    logps = torch.cat([part.logps.unflatten(0, (len(measurement.views), -1)) for part in parts], 1)  # (views, N, T)
    if args.perturbation in measurement.views:
        rollout.changes = logps[measurement.views.index(args.perturbation)] - signals.logps
    turns = rollout.turns
    seen = rows_with_images(batch) if turns is None else rows_perturbed(turns, args.perturb_images)
    blind = ~seen.to(logps.device).unsqueeze(1)  # (N, 1)
    views = dict(zip(measurement.views, logps.masked_fill(blind, torch.nan), strict=True))
    if "views" in measurement.needed:
        signals.views = {name: value.float() for name, value in views.items()}
    if "dependency" in measurement.needed:
        perturbed = torch.stack([views[name] for name in args.perturbations])
        each = visual_dependency(signals.logps.expand_as(perturbed), perturbed)
        signals.dependency = each.mean(0) if args.dependency_over == "mean" else each.amin(0)
    if measurement.needs("shift") and rollout.scores is not None and rollout.scores.hidden is not None:
        mask = signals.mask.bool()
        with torch.no_grad():
            others = torch.cat(
                [part.hidden[: len(part.hidden) // len(views)] for part in parts if part.hidden is not None]
            )
            shift = Head(causal_model(trainer.model)).shift(rollout.scores.hidden, others, mask, args.temperature)
        signals.jsd, signals.perturbed_entropies = (each.masked_fill(blind, torch.nan) for each in shift)
    rollout.metrics = named_metrics(add_named(measurement.named, signals), signals, trainer.accelerator.gather)


def _inputs_under(name: str, trainer: ConstructedTrainer, rollout: Rollout, rows: range) -> dict[str, Any]:
    """Return scoring inputs of rows of the rollout with their images perturbed by `name`."""
    args, count, messages = trainer.args, len(rollout.batch["prompt_ids"]), rollout.messages[rows.start : rows.stop]
    batch = rollout.batch if len(rows) == count else take_rows(rollout.batch, rows)
    if name == REMOVE_IMAGE:
        prompts = trainer.tokenize([drop_images(prompt) for prompt in messages])
        return text_inputs(batch, prompts, trainer._tokenizer.pad_token_id)
    first = trainer.accelerator.process_index * count
    shared_by = trainer.completions_per_prompt if args.perturb_per == "prompt" else 1
    parameters, step = args.parameters_of(name), trainer.state.global_step
    perturb = partial(perturb_images, name=name, parameters=parameters, seed=args.seed, step=step)
    numbers = [(first + row) // shared_by for row in rows]
    if rollout.turns is None:
        inputs, images = inputs_with_other_images(trainer, batch, messages, numbers, perturb)
    else:
        turns = rollout.turns.take(rows)
        images = perturb_turns(turns, numbers, args.perturb_images, perturb)
        inputs = scoring_inputs(batch)
        if any(images):
            pixels = pixels_of_rows(process_images(trainer, images), images, list(range(len(rows))), batch)
            inputs = scoring_inputs({**batch, "pixel_values": joined(pixels)})
    if name == args.perturbation:
        rollout.perturbed_images |= zip(rows, images, strict=True)
    return inputs


def inputs_with_other_images(
    trainer: ConstructedTrainer,
    batch: Mapping[str, Any],
    messages: Sequence[Any],
    numbers: Sequence[int],
    perturb: Perturb,
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return scoring inputs of the rows of a batch with perturbed images, and these images of each row.

    Args:
        messages: per row, its conversation with its images.
        numbers: per row, a number that rows with the same perturbed images share.
        perturb: returns the perturbed images of a conversation.

    Raises:
        DataError: the pixels of the perturbed images cannot take the place of those of the batch.
    """
    conversations, own = perturbed_prompts(messages, numbers, perturb)
    images = [images_in(conversations[place]) for place in own]
    prompts = trainer.tokenize(conversations)
    if prompts.images is None:
        return scoring_inputs(batch), images
    pixels = joined(pixels_of_rows(prompts.fields, prompts.images, own, batch))
    return scoring_inputs({**batch, "pixel_values": pixels}), images


# Which vision tokens of a rollout batch stand for what its questions are about


_WHOLE: list[Box] = [(0.0, 0.0, 1.0, 1.0)]


def region_mask(trainer: ConstructedTrainer, rollout: Rollout, prompt_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the vision tokens of each row's boxes, (N, P) bool; None if nothing reads them.

    A row without a box, or with several images, has none.
    """
    if "regions" not in trainer.measurement.needed:
        return None
    vision_tokens = torch.tensor(trainer.measurement.vision_token_ids, device=prompt_ids.device)
    vision = torch.isin(prompt_ids, vision_tokens)  # (N, P)
    region = torch.zeros_like(vision)
    rows, size = len(rollout.rows), 1 if rollout.greedy else trainer.completions_per_prompt
    first = trainer.accelerator.process_index * rows
    boxes: dict[int, list[Box]] = {}  # number of the prompt -> its boxes
    members: dict[int, list[int]] = {}
    for row in range(rows):
        images = images_in(rollout.messages[row])
        if len(images) == 1 and (
            found := boxes_of(rollout.rows[row], images[0].size, f"The {describe_row(rollout.rows[row])}")
        ):
            number = (first + row) // size
            boxes[number] = found
            members.setdefault(number, []).append(row)
    if not boxes:
        return region
    leaders = [members[number][0] for number in boxes]
    conversations = [rollout.messages[row] for row in leaders]
    shown, black, white = (
        image_tensors(trainer.tokenize(perturbed_prompts(conversations, list(boxes), partial(_painted, lit))[0]).fields)
        for lit in (boxes, {}, dict.fromkeys(boxes, _WHOLE))
    )
    lit = lit_share(*(given["pixel_values"] for given in (shown, black, white)))
    ones = [1] * len(leaders)
    parts = parts_by_counts(shown, ones, tiles_by_tokens(image_inputs_of(shown), ones, vision[leaders].cpu()))
    for index, number in enumerate(boxes):
        given = {name: value[parts[name][index]] for name, value in shown.items()}
        places = vision[leaders[index]].nonzero().flatten()
        shares = token_shares(lit[parts["pixel_values"][index]], given, len(places))
        chosen = select_region(shares).to(region.device)
        for row in members[number]:
            region[row, vision[row]] = chosen
    return region


def _painted(boxes: dict[int, list[Box]], images: list[Image.Image], *, index: int) -> list[Any]:
    return [drawn(boxes.get(index, []), images[0].size)]
