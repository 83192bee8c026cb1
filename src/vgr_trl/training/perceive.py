"""The pass of a rollout over perturbed images: what its completions depend on the original ones for."""

from functools import partial
from typing import Any

import torch

from vgr_trl.batch.inputs import joined, pixels_of_rows, rows_with_images, scoring_inputs, stacked_inputs
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
    names = host.args.perturbations if measurement.wanted.dependency else host.args.perturbations[:1]
    views = [_perturbed_pixels(rollout, host, name) for name in names]
    if has_loss and views[0] is not None:
        batch["perturbed_pixel_values"] = joined(views[0])
    if measurement.wanted.dependency:
        perturbed = [
            scoring_inputs(batch | {"pixel_values": joined(pixels)} if pixels is not None else batch)
            for pixels in views
        ]
        signals = rollout.signals
        assert signals is not None
        logps = host.score(stacked_inputs(perturbed)).unflatten(0, (len(views), -1))  # (views, N, T)
        rollout.changes = logps[0] - signals.logps
        blind = ~rows_with_images(batch).to(logps.device).unsqueeze(1)  # (N, 1)
        each = visual_dependency(signals.logps.expand_as(logps), logps)
        dependency = each.mean(0) if host.args.dependency_over == "mean" else each.amin(0)
        signals.dependency = dependency.masked_fill(blind, torch.nan)
        new = add_named(measurement.named, signals)
        rollout.metrics = named_metrics(new, signals, host.accelerator.gather)
    return rollout


def _perturbed_pixels(rollout: Rollout, host: Host, name: str) -> Any:
    """The rows' `pixel_values` with images perturbed by `name`: per row in a list, or (N, ...); None without images."""
    args, rows = host.args, len(rollout.batch["prompt_ids"])
    first = host.accelerator.process_index * rows
    shared_by = host.num_generations if args.perturb_per == "prompt" else 1
    perturb = partial(
        perturb_images,
        name=name,
        parameters=args.parameters_of(name),
        seed=args.seed,
        step=host.state.global_step,
    )
    assert rollout.messages is not None
    prompts, own = perturbed_prompts(rollout.messages, [(first + row) // shared_by for row in range(rows)], perturb)
    if name == args.perturbation:
        rollout.perturbed_images = [images_in(prompts[place]) for place in own]
    images, fields = host.tokenize(prompts)
    return None if images is None else pixels_of_rows(fields, images, own, rollout.batch)
