"""The pass of a rollout over perturbed images: what its completions depend on the original ones for."""

from functools import partial
from typing import Any

import torch

from vgr_trl.batch.inputs import joined, pixels_of_rows, rows_with_images, scoring_inputs
from vgr_trl.signals import Measurement, perturb_images, visual_dependency
from vgr_trl.signals.named import add_named, named_metrics
from vgr_trl.signals.perturbation.prompts import images_in, perturbed_prompts
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout


def perceive(rollout: Rollout, host: Host, measurement: Measurement) -> Rollout:
    """Score the completions given perturbed images; return the rollout with their dependency among its signals.

    Args:
        rollout: judged; its batch gets `perturbed_pixel_values` where the perception loss is on.
        host: where it runs.
        measurement: what is wanted.
    """
    has_loss = host.args.uses_perception_loss
    if not (measurement.wanted.dependency or has_loss):
        return rollout
    batch = rollout.batch
    pixels = _perturbed_pixels(rollout, host)
    if has_loss and pixels is not None:
        batch["perturbed_pixel_values"] = joined(pixels)
    if measurement.wanted.dependency:
        perturbed = scoring_inputs(batch | {"pixel_values": joined(pixels)} if pixels is not None else batch)
        logps = host.score(perturbed)
        assert rollout.signals is not None
        rollout.changes = logps - rollout.signals.logps
        blind = ~rows_with_images(batch).to(logps.device).unsqueeze(1)  # (N, 1)
        rollout.signals.dependency = visual_dependency(rollout.signals.logps, logps).masked_fill(blind, torch.nan)
        new = add_named(measurement.named, rollout.signals)
        rollout.metrics = named_metrics(new, rollout.signals, host.accelerator.gather)
    return rollout


def _perturbed_pixels(rollout: Rollout, host: Host) -> Any:
    """The rows' `pixel_values` with perturbed images: per row in a list, or (N, ...); None without images."""
    args, rows = host.args, len(rollout.batch["prompt_ids"])
    first = host.accelerator.process_index * rows
    shared_by = host.num_generations if args.perturb_per == "prompt" else 1
    perturb = partial(
        perturb_images,
        name=args.perturbation,
        parameters=args.perturbation_parameters,
        seed=args.seed,
        step=host.state.global_step,
    )
    assert rollout.messages is not None
    prompts, own = perturbed_prompts(rollout.messages, [(first + row) // shared_by for row in range(rows)], perturb)
    rollout.perturbed_images = [images_in(prompts[place]) for place in own]
    images, fields = host.tokenize(prompts)
    return None if images is None else pixels_of_rows(fields, images, own, rollout.batch)
