"""The pass of a rollout over perturbed images: what its completions depend on the original ones for."""

from functools import partial
from typing import Any

import torch

from vgr_trl.batch.inputs import (
    joined,
    pixels_of_rows,
    rows_with_images,
    scoring_inputs,
    stacked_inputs,
    text_inputs,
    valid_tokens,
)
from vgr_trl.batch.signals import unmeasured
from vgr_trl.config.plugins import REMOVE_IMAGE
from vgr_trl.signals import Measurement, perturb_images, visual_dependency
from vgr_trl.signals.named import add_named, named_metrics
from vgr_trl.signals.perturbation.conversations import images_in, perturbed_prompts, without_images
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout


def perceive(rollout: Rollout, host: Host, measurement: Measurement) -> Rollout:
    """Score the completions given perturbed images; return the rollout with their dependency among its signals.

    Args:
        rollout: judged; its batch gets `perturbed_pixel_values` where the perception loss is on.
    """
    args, batch, wanted = host.args, rollout.batch, measurement.wanted
    shown = [args.perturbation] if args.uses_perception_loss else []
    inputs = {name: _inputs_under(name, rollout, host) for name in dict.fromkeys([*measurement.views, *shown])}
    for name in shown:
        if "pixel_values" in inputs[name]:
            batch["perturbed_pixel_values"] = inputs[name]["pixel_values"]
    if not measurement.views:
        rollout.hidden = None
        return rollout
    rollout.signals = signals = rollout.signals or unmeasured(valid_tokens(batch).bool())
    logps = host.score(stacked_inputs([inputs[name] for name in measurement.views]))
    logps = logps.unflatten(0, (len(measurement.views), -1))  # (views, N, T)
    if args.perturbation in measurement.views:
        rollout.changes = logps[measurement.views.index(args.perturbation)] - signals.logps
    blind = ~rows_with_images(batch).to(logps.device).unsqueeze(1)  # (N, 1)
    views = dict(zip(measurement.views, logps.masked_fill(blind, torch.nan), strict=True))
    if wanted.views:
        signals.views = {name: value.float() for name, value in views.items()}
    if wanted.dependency:
        seen = torch.stack([views[name] for name in args.perturbations])
        each = visual_dependency(signals.logps.expand_as(seen), seen)
        signals.dependency = each.mean(0) if args.dependency_over == "mean" else each.amin(0)
    if rollout.shift is not None:
        signals.jsd, signals.perturbed_entropies = (each.masked_fill(blind, torch.nan) for each in rollout.shift)
    rollout.hidden = rollout.shift = None
    rollout.metrics = named_metrics(add_named(measurement.named, signals), signals, host.accelerator.gather)
    return rollout


def _inputs_under(name: str, rollout: Rollout, host: Host) -> dict[str, Any]:
    """Of the scoring of the rollout's rows with their images perturbed by `name`."""
    if name == REMOVE_IMAGE:
        assert rollout.messages is not None
        prompts = host.tokenize([without_images(prompt) for prompt in rollout.messages])
        return text_inputs(rollout.batch, prompts, host.tokenizer.pad_token_id)
    pixels = perturbed_pixels(rollout, host, name)
    return scoring_inputs(rollout.batch if pixels is None else rollout.batch | {"pixel_values": joined(pixels)})


def perturbed_pixels(rollout: Rollout, host: Host, name: str) -> Any:
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
    conversations, own = perturbed_prompts(
        rollout.messages, [(first + row) // shared_by for row in range(rows)], perturb
    )
    if name == args.perturbation:
        rollout.perturbed_images = [images_in(conversations[place]) for place in own]
    prompts = host.tokenize(conversations)
    return None if prompts.images is None else pixels_of_rows(prompts.fields, prompts.images, own, rollout.batch)
