"""Which vision tokens of a rollout batch stand for what its questions are about."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from PIL import Image

from vgr_trl.batch.image_parts import image_inputs_of, parts_by_counts, tiles_by_tokens
from vgr_trl.batch.inputs import image_tensors
from vgr_trl.data.rows.regions import Box, boxes_of
from vgr_trl.data.rows.text.marks import texts_of
from vgr_trl.signals import Measurement
from vgr_trl.signals.perturbation.conversations import images_in, perturbed_prompts
from vgr_trl.signals.region_boxes import drawn
from vgr_trl.signals.region_tokens import in_region, lit_share, token_shares
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout

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
