"""The pass of a trainer over perturbed images, and what its completions depend on the original ones for."""

from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from vgr_trl.batch.inputs import joined, pixels_of_rows, rows_with_images, scoring_inputs
from vgr_trl.signals import perturb_images, visual_dependency
from vgr_trl.signals.perturbed_prompts import perturbed_prompts


def perceive(trainer: Any, batch: dict[str, Any]) -> None:
    """Score the completions given perturbed images; leave what depends on the image in the signals.

    Args:
        trainer: the `DAPOTrainer` at work.
        batch: its judged rollout batch, which gets `perturbed_pixel_values` where the perception loss is on.
    """
    measurement, has_loss = trainer._measurement, trainer.args.uses_perception_loss
    if not (measurement.wanted.dependency or has_loss):
        return
    pixels = _perturbed_pixels(trainer, batch)
    if has_loss and pixels is not None:
        batch["perturbed_pixel_values"] = joined(pixels)
    if measurement.wanted.dependency:
        perturbed = scoring_inputs(batch | {"pixel_values": joined(pixels)} if pixels is not None else batch)
        logps, _, _ = trainer._score(perturbed)
        signals = measurement.signals
        blind = ~rows_with_images(batch).to(logps.device).unsqueeze(1)  # (N, 1)
        signals.dependency = visual_dependency(signals.logps, logps).masked_fill(blind, torch.nan)


def _perturbed_pixels(trainer: Any, batch: dict[str, Any]) -> Any:
    """The rows' `pixel_values` with perturbed images: per row in a list, or (N, ...); None without images."""
    args, rows = trainer.args, len(batch["prompt_ids"])
    first = trainer.accelerator.process_index * rows
    shared_by = trainer.num_generations if args.perturb_per == "prompt" else 1
    perturb = partial(
        perturb_images,
        name=args.perturbation,
        parameters=args.perturbation_parameters,
        seed=args.seed,
        step=trainer.state.global_step,
    )
    prompts, own = perturbed_prompts(
        trainer._measurement.messages, [(first + row) // shared_by for row in range(rows)], perturb
    )
    _, images, fields = GRPOTrainer._tokenize_prompts(trainer, prompts)
    return None if images is None else pixels_of_rows(fields, images, own, batch)
