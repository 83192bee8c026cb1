"""Score completions given perturbed images."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.passes.run_pass import Purpose
from vgr_trl.pixels import joined
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.scoring_inputs import (
    Prompts,
    pixels_of_rows,
    rows_with_images,
    scoring_inputs,
    stacked_inputs,
    take_rows,
    text_inputs,
    valid_tokens,
)
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.shared_passes import whole_groups
from vgr_trl.signals.columns import named_metrics
from vgr_trl.signals.head import Head
from vgr_trl.signals.named import add_named
from vgr_trl.signals.perturbation import perturb_images
from vgr_trl.signals.ratios import visual_dependency
from vgr_trl.signals.rollout_signals import build_unmeasured_signals
from vgr_trl.signals.scoring import Want
from vgr_trl.views.conversations import (
    Perturb,
    drop_images,
    images_in,
    perturb_prompts,
    perturb_turns,
    process_images,
    rows_perturbed,
)


def score_perturbed(trainer: ConstructedTrainer, rollout: Rollout) -> None:
    """Score the completions given perturbed images, and add the dependency to the rollout's signals.

    Only the pixels of one pass are kept in memory. If the perception loss is on, the batch gets the perturbed pixels of
    all rows as `perturbed_pixel_values`.
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
        hidden = [part.hidden[: len(part.hidden) // len(views)] for part in parts if part.hidden is not None]
        with torch.no_grad():
            others = torch.cat(hidden)
            shift = Head(causal_model(trainer.model)).shift(rollout.scores.hidden, others, mask, args.temperature)
        signals.jsd, signals.perturbed_entropies = (each.masked_fill(blind, torch.nan) for each in shift)
    rollout.metrics = named_metrics(add_named(measurement.named, signals), signals, trainer.accelerator.gather)


def _inputs_under(name: str, trainer: ConstructedTrainer, rollout: Rollout, rows: range) -> dict[str, Any]:
    """Build the scoring inputs of some rows of a rollout under the perturbation `name`."""
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
        inputs, images = inputs_with_other_images(trainer.tokenize, batch, messages, numbers, perturb)
    else:
        turns = rollout.turns.take(rows)
        images = perturb_turns(turns, numbers, args.perturb_images, perturb)
        inputs = scoring_inputs(batch)
        if any(images):
            fields = process_images(trainer.processing_class, images)
            pixels = pixels_of_rows(fields, images, range(len(rows)), batch)
            inputs = scoring_inputs({**batch, "pixel_values": joined(pixels)})
    if name == args.perturbation:
        rollout.perturbed_images |= zip(rows, images, strict=True)
    return inputs


def inputs_with_other_images(
    tokenize: Callable[[list[Any]], Prompts],
    batch: Mapping[str, Any],
    messages: Sequence[Any],
    numbers: Sequence[int],
    perturb: Perturb,
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Build the scoring inputs of a batch with perturbed images; return the perturbed images of each row too.

    Args:
        tokenize: makes tokens and pixels of conversations.
        batch: a batch of TRL.
        messages: conversation of each row, with its images.
        numbers: one number per row; rows with the same perturbed images share it.
        perturb: returns the perturbed images of a conversation.

    Raises:
        DataError: the perturbed images have other pixel shapes than the images.
    """
    conversations, own = perturb_prompts(messages, numbers, perturb)
    images = [images_in(conversations[place]) for place in own]
    prompts = tokenize(conversations)
    if prompts.images is None:
        return scoring_inputs(batch), images
    pixels = joined(pixels_of_rows(prompts.fields, prompts.images, own, batch))
    return scoring_inputs({**batch, "pixel_values": pixels}), images
