"""What a rollout is measured for: its signals, its regions, and its dependence on the original images."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from PIL import Image

from vgr_trl.batch import (
    build_scoring_batch,
    image_inputs_of,
    image_tensors,
    joined,
    parts_by_counts,
    pixels_of_rows,
    rows_with_images,
    scoring_inputs,
    stacked_inputs,
    text_inputs,
    tiles_by_tokens,
    unmeasured,
    valid_tokens,
)
from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.data.images import Box, boxes_of
from vgr_trl.data.prompts import texts_of
from vgr_trl.rollout import Host, Rollout
from vgr_trl.signals.dependency import visual_dependency
from vgr_trl.signals.named import (
    add_named,
    attention_metrics,
    measure_segments,
    named_columns,
    named_metrics,
    reward_columns,
)
from vgr_trl.signals.perturbation import images_in, perturb_images, perturbed_prompts, without_images
from vgr_trl.signals.regions import drawn, in_region, lit_share, token_shares
from vgr_trl.signals.scoring import Measurement, signals_of_generation

# ---------------------------------------------------------------------------------------------------------------------
# The pass that measures the completions of a rollout, and what rewards get of it.


def score_completions(rollout: Rollout, host: Host, measurement: Measurement, completion_ids: list[list[int]]) -> None:
    """Make the measured pass over a rollout, as TRL makes its own for old log-probabilities, as far as it is needed."""
    finished = [ids[-1] in host.end_token_ids for ids in completion_ids]
    assert rollout.prompts is not None
    inputs = build_scoring_batch(
        rollout.prompts,
        completion_ids,
        pad_token_id=host.tokenizer.pad_token_id,
        vision_token_ids=measurement.vision_token_ids,
        valid=finished if host.args.mask_truncated_completions else None,
        pad_to_multiple_of=host.pad_to_multiple_of,
    ).inputs()
    if measurement.wanted.head:
        host.score(inputs)
    elif rollout.generated_mass is not None and rollout.recorded is None and not measurement.reads_pass:
        mask = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].to(rollout.generated_mass.mask.device)
        rollout.signals = signals_of_generation(rollout.generated_mass, mask)
    else:
        host.score(inputs, head=False, rows=rollout.recorded)


def signals_as_columns(
    rollout: Rollout, host: Host, measurement: Measurement
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the columns that rewards get of the signals of a rollout, and its metrics; empty if there are none."""
    if rollout.signals is None:
        return {}, {}
    new = add_named(measurement.named, rollout.signals)
    named = named_columns(new, rollout.signals), named_metrics(new, rollout.signals, host.accelerator.gather)
    mass = rollout.signals.attention
    if mass is None:
        return named
    segmentation = host.args.attention_segments, host.args.mdi_balance_ratio
    segments = measure_segments(mass, *segmentation)
    of_prompt = None if rollout.prompt_mass is None else measure_segments(rollout.prompt_mass, *segmentation)
    metrics = attention_metrics(segments, host.accelerator.gather, of_prompt)
    columns = reward_columns(segments)
    columns["mdi_balance_ratio"] = [host.args.mdi_balance_ratio] * len(rollout.rows)
    return named[0] | columns, metrics | named[1]


# ---------------------------------------------------------------------------------------------------------------------
# The pass of a rollout over perturbed images: what its completions depend on the original ones for.


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


# ---------------------------------------------------------------------------------------------------------------------
# Which vision tokens of a rollout batch stand for what its questions are about.


_WHOLE: list[Box] = [(0.0, 0.0, 1.0, 1.0)]


def region_mask(
    rollout: Rollout, host: Host, measurement: Measurement, prompt_ids: torch.Tensor
) -> torch.Tensor | None:
    """Return the vision tokens of each row's boxes, (N, P) bool; None if nothing reads them.

    A row without a box, or with several images, has none.
    """
    if not measurement.wanted.regions or rollout.messages is None:
        return None
    vision = torch.isin(prompt_ids, torch.tensor(measurement.vision_token_ids, device=prompt_ids.device))  # (N, P)
    region = torch.zeros_like(vision)
    rows, size = len(rollout.rows), 1 if rollout.greedy else host.num_generations
    first = host.accelerator.process_index * rows
    boxes: dict[int, list[Box]] = {}  # number of the prompt -> its boxes
    members: dict[int, list[int]] = {}
    for row in range(rows):
        images = images_in(rollout.messages[row])
        if len(images) == 1 and (found := boxes_of(rollout.rows[row], images[0].size, _name(rollout.rows[row]))):
            number = (first + row) // size
            boxes[number] = found
            members.setdefault(number, []).append(row)
    if not boxes:
        return region
    leaders = [members[number][0] for number in boxes]
    conversations = [rollout.messages[row] for row in leaders]
    shown, black, white = (
        image_tensors(host.tokenize(perturbed_prompts(conversations, list(boxes), painted)[0]).fields)
        for painted in (
            partial(_painted, boxes),
            partial(_painted, {}),
            partial(_painted, dict.fromkeys(boxes, _WHOLE)),
        )
    )
    lit = lit_share(*(given["pixel_values"] for given in (shown, black, white)))
    ones = [1] * len(leaders)
    parts = parts_by_counts(shown, ones, tiles_by_tokens(image_inputs_of(shown), ones, vision[leaders].cpu()))
    pinpoints = getattr(getattr(host.processor, "image_processor", None), "image_grid_pinpoints", None)
    for index, number in enumerate(boxes):
        given = {name: value[parts[name][index]] for name, value in shown.items()}
        places = vision[leaders[index]].nonzero().flatten()
        shares = token_shares(lit[parts["pixel_values"][index]], given, len(places), pinpoints)
        chosen = in_region(shares).to(region.device)
        for row in members[number]:
            region[row, vision[row]] = chosen
    return region


def _name(row: Mapping[str, Any]) -> str:
    if row.get("id") is not None:
        return f"The row with the id {row['id']!r}"
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else " ".join(texts_of(prompt[-1:]))
    return f"The row with the prompt {text[:100]!r}"


def _painted(boxes: dict[int, list[Box]], images: list[Image.Image], *, index: int) -> list[Any]:
    return [drawn(boxes.get(index, []), images[0].size)]
