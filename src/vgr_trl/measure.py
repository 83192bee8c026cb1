"""Score completions and perturbed views of a rollout; check once that the model uses the pixels."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from PIL import Image
from torch.nn import functional
from transformers.utils import logging

from vgr_trl.boxes import Box, boxes_of
from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.generation import perturb_turns, process_images, rows_perturbed
from vgr_trl.metrics import ENGINE_BOUND
from vgr_trl.passes.loss_mask import find_window, trim_inputs
from vgr_trl.passes.run_pass import Purpose
from vgr_trl.patches.trl import mark_images
from vgr_trl.pixels import image_inputs_of, image_tensors, joined, parts_by_counts, tiles_by_tokens
from vgr_trl.rollout import ConstructedTrainer, Rollout, describe_row, find_completion_maker
from vgr_trl.rows import (
    build_scoring_inputs,
    pixels_of_rows,
    rows_with_images,
    scoring_inputs,
    stacked_inputs,
    take_rows,
    text_inputs,
    valid_tokens,
)
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.sharing import whole_groups
from vgr_trl.signals.head import Head
from vgr_trl.signals.named import (
    PER_IMAGE,
    SINGLE_COLUMNS,
    RolloutSignals,
    add_named,
    attention_metrics,
    build_unmeasured_signals,
    named_columns,
    named_metrics,
    reward_columns,
)
from vgr_trl.signals.perturbation import Perturb, derive_seed, drop_images, images_in, perturb_images, perturbed_prompts
from vgr_trl.signals.ratios import (
    AttentionMass,
    drawn,
    late_layers,
    lit_share,
    measure_segments,
    select_region,
    token_shares,
    visual_dependency,
)
from vgr_trl.signals.scoring import AttentionPlan, Scores, Want, given_tokens
from vgr_trl.utils import DataError

MOST_KEPT = 2**29  # bytes of device memory for attention kept token by token; 10 rows of 1,024 tokens of a 7 B model


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
    entropies: Any = scores.entropies
    return RolloutSignals(scores.logps.float(), entropies.float(), scores.mask, mass, similarity=scores.similarity)


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
    mass, mask = generated.measured("attention"), mask.to(generated.mask.device)
    missing = mask.size(1) - generated.mask.size(1)  # the longest completion may have been cut or padded
    values = generated.logps, generated.entropies, mass.vision, mass.instruction
    logps, entropies, vision, instruction = (functional.pad(each, (0, missing)) * mask for each in values)
    return RolloutSignals(logps, entropies, mask, replace(mass, vision=vision, instruction=instruction, mask=mask))


def signals_as_columns(trainer: ConstructedTrainer, rollout: Rollout) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the columns that rewards get of the signals of a rollout, and its metrics; empty if there are none."""
    args, gather, signals = trainer.args, trainer.accelerator.gather, cast("RolloutSignals", rollout.signals)
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
    trainer: ConstructedTrainer, mass: Any, prompt_mass: AttentionMass | None
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the `SIGNAL_COLUMNS` of completions, and the metrics of those of all processes."""
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
        if pixels is not None:
            rollout.batch = batch = batch | {"perturbed_pixel_values": pixels}
    if not measurement.views:
        return
    rollout.signals = signals = rollout.signals or build_unmeasured_signals(valid_tokens(batch).bool())
    size = whole_groups(trainer.rows_per_pass.given, trainer.completions_per_prompt)
    parts = [
        trainer.score(
            stacked_inputs([_inputs_under(name, trainer, rollout, rows) for name in measurement.views]),
            Want(hidden=measurement.needs("shift")),
            purpose=Purpose.VIEW,
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


logger = logging.get_logger(__name__)
UNCHANGED = 1e-5  # nats; smaller changes of every log-probability are rounding
_REMEDY = "or set check_pixels to False to train anyway"


@dataclass(frozen=True)
class PixelUse:
    """How log-probabilities of completions with an image differ, in nats.

    Attributes:
        tokens: number of tokens compared.
        change: mean |change| behind a blank image.
        largest: largest |change| behind a blank image.
        engine: mean distance of the engine's from the trainer's; None without an engine that returns its own.
        engine_blank: mean distance of the engine's from the trainer's behind a blank image; None likewise.
    """

    tokens: int
    change: float
    largest: float
    engine: float | None = None
    engine_blank: float | None = None

    def describe(self) -> str:
        """Return the line of a run; an engine closer to the trainer without the image does not get it."""
        line = f"With a blank image, log-probabilities change by {self.change:.3g} nats per token"
        if self.engine is None:
            return line + "."
        line += f"; those of vLLM are {self.engine:.3g} from the trainer's"
        if self.engine > ENGINE_BOUND:
            line += f", more than {ENGINE_BOUND}: compare its weights, chat template and image processor"
            if (self.engine_blank or 0) < self.engine:
                line += f". With a blank image they are {self.engine_blank:.3g} from the trainer's: vLLM gets no images"
        return line + "."


def compare_logps(
    logps: torch.Tensor,
    blank: torch.Tensor,
    engine: torch.Tensor | None,
    mask: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> PixelUse:
    """Compare log-probabilities (N, T) of completions given their images, given blank ones, and of the engine.

    Args:
        engine: NaN where it has none; None on every process, or on none.
        mask: (N, T) bool, tokens that are compared.
        gather: over processes.
    """
    change = (blank - logps).abs()[mask]
    given = logps if engine is None else engine.to(logps)
    known = mask & given.isfinite()
    distances = [(given - other).abs()[known].sum() for other in (logps, blank)]
    sums = torch.stack([mask.sum().to(logps), change.sum(), known.sum().to(logps), *distances])
    largest = float(gather(change.max().view(1) if len(change) else logps.new_zeros(1)).max())
    tokens, changed, both, apart, apart_blank = gather(sums.unsqueeze(0)).double().sum(0).tolist()
    of_engine = (None, None) if engine is None or not both else (apart / both, apart_blank / both)
    return PixelUse(int(tokens), changed / max(tokens, 1), largest, *of_engine)


def check_pixel_use(trainer: ConstructedTrainer, rollout: Rollout) -> dict[str, float] | None:
    """Score the first group with an image again behind a blank image; log one line, and return metrics.

    Every process makes the same passes.

    Returns:
        None: no token is to be compared, so that the next rollout has to be checked.

    Raises:
        DataError: no log-probability changes; in every process.
    """
    batch, accelerator, size = rollout.batch, trainer.accelerator, trainer.completions_per_prompt
    if find_completion_maker(trainer) is not None:
        return {}
    valid = valid_tokens(batch).bool()
    compared = valid & rows_with_images(batch).to(valid.device).unsqueeze(1)  # (N, T)
    if not accelerator.gather(compared.sum().view(1)).any():
        return None
    start = min(int(compared.any(1).int().argmax()), max(len(valid) - size, 0))
    rows = list(range(start, min(start + size, len(valid))))
    part, inputs, why = take_rows(batch, rows), [], ""
    try:
        blank = partial(perturb_images, name="mask_image", seed=0, step=0)
        prompts = [(accelerator.process_index * len(valid) + row) // size for row in rows]
        other, _ = inputs_with_other_images(trainer, part, [rollout.messages[row] for row in rows], prompts, blank)
        inputs = [scoring_inputs(part), other]
    except DataError as error:
        why = f": {error}"
    if not accelerator.gather(torch.tensor([bool(inputs)], device=accelerator.device)).all():
        logger.warning_once(f"Skipped the check that the model uses the pixels{why}")
        return {}
    with keep_random_state(accelerator.device):
        logps, behind_blank = (trainer.score(each, Want()).logps.float() for each in inputs)  # pixels are not joined
    engine = part.get("sampling_per_token_logps")
    if engine is not None and rollout.noise is not None:  # the engine saw other images there
        noisy = torch.tensor([rollout.noise.rows[row] for row in rows], device=engine.device)
        engine = engine.masked_fill(noisy.unsqueeze(1), torch.nan)
    use = compare_logps(logps, behind_blank, engine, compared[rows].to(logps.device), accelerator.gather)
    if use.tokens and use.largest < UNCHANGED:
        raise DataError(
            f"The log-probabilities of {use.tokens} tokens do not change with a blank image, so the model does not "
            f"use its images: check that it reads pixel_values and that the processor passes them on, {_REMEDY}."
        )
    if accelerator.is_main_process:
        logger.warning(use.describe())
    metrics = {"pixels/change": use.change, "pixels/engine_distance": use.engine}
    return {name: value for name, value in metrics.items() if value is not None}
