"""Turns of completions that call tools: the policy's own tokens, and the images that tools have returned."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from vgr_trl.pixels import image_tensors
from vgr_trl.rollout import ConstructedTrainer, Rollout, describe_row
from vgr_trl.rows import ImagesOfRows, Turns
from vgr_trl.signals.perturbation import Perturb
from vgr_trl.tools import show_again
from vgr_trl.utils import DataError


def collect_turns(trainer: ConstructedTrainer, rollout: Rollout, generated: Sequence[Any]) -> Turns:
    """Return the turns of what TRL's `_generate` has returned for a rollout.

    Raises:
        DataError: a row has other image tokens than its images take, or TRL does not know the model's image token.
    """
    prompt_ids, completion_ids, own, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(own)]
    fields = process_images(trainer, images) if any(returned) and trainer._is_vlm else {}
    if "image_grid_thw" in fields:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        refuse_mismatch(trainer, rollout.rows, ids, images, fields["image_grid_thw"])
    elif fields and "token_type_ids" in rollout.prompts.fields and trainer._image_pad_token_id is None:
        # TRL 1.16 marks <|image_pad|> and <|image|> alone, see https://github.com/huggingface/trl/issues/6906.
        raise DataError(
            "A tool has returned an image, whose tokens TRL cannot mark for this model: use a Qwen-VL model, or tools "
            "that return text."
        )
    return Turns(own, images, returned, fields)


def process_images(trainer: ConstructedTrainer, images: ImagesOfRows) -> dict[str, torch.Tensor]:
    """Return the pixel inputs that TRL makes of the images of all rows, where tools have returned some."""
    processor: Any = trainer.processing_class
    flat = [image for of_row in images for image in of_row]
    return image_tensors(processor.image_processor(images=flat, return_tensors="pt"))


def refuse_mismatch(
    trainer: ConstructedTrainer,
    rows: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    images: ImagesOfRows,
    grids: torch.Tensor,
) -> None:
    """Raise `DataError` if a row has other image tokens than its images take.

    TRL 1.16 then trains on all rows of the process without their images (`has_mismatch` in grpo_trainer.py).

    Args:
        ids: of prompts and completions.
        images: of each row.
        grids: patches of all images along time, height and width, (images, 3).
    """
    processor: Any = trainer.processing_class
    wanted = iter((grids.prod(-1) // getattr(processor.image_processor, "merge_size", 2) ** 2).tolist())
    for row, tokens, of_row in zip(rows, ids, images, strict=True):
        takes, count = sum(next(wanted) for _ in of_row), [*tokens].count(trainer._image_pad_token_id or -1)
        if count != takes:
            raise DataError(
                f"The {describe_row(row)} has {count} image tokens with its completion, but its {len(of_row)} "
                f"images take {takes}: use a chat template that writes the images of tool messages, and tools whose "
                "texts hold no image token."
            )


def perturb_turns(turns: Turns, numbers: Sequence[int], which: str, perturb: Perturb) -> list[list[Image.Image]]:
    """Return the images of each row, those of its prompt first, of which some are perturbed.

    With `all`, what `vgr_trl.tools` show of the first image is the same part of the perturbed image.

    Args:
        numbers: per row, a number that rows with the same perturbed images of the prompt share, over all processes.
        which: `all`, or only those of the `prompt` or of `tools`.
        perturb: returns perturbed images, given their number and the place of the first in the row.
    """
    of_prompts: dict[int, list[Image.Image]] = {}
    shown = []
    for of_row, returned, number in zip(turns.images, turns.returned, numbers, strict=True):
        images, count = [*of_row], len(of_row) - len(returned)
        if which != "tools":
            if number not in of_prompts:
                of_prompts[number] = perturb(images[:count], index=number)
            images[:count] = of_prompts[number]
        if which != "prompt":
            images[count:] = perturb(images[count:], index=number, first=count)
        if which == "all" and count:
            parts = [show_again(part, images[0]) for part in of_row[count:]]
            images[count:] = [part or other for part, other in zip(parts, images[count:], strict=True)]
        shown.append(images)
    return shown


def rows_perturbed(turns: Turns, which: str) -> torch.Tensor:
    """Return which rows have an image that `perturb_turns` perturbs, (N,) bool."""
    returned = torch.tensor([*map(len, turns.returned)])
    every = torch.tensor([*map(len, turns.images)])
    return {"all": every, "tools": returned, "prompt": every - returned}[which] > 0


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Return the columns `TURN_COLUMNS` that rewards get: messages of the policy, of tools, and images of tools."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([each.count("assistant") for each in roles], [each.count("tool") for each in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))


def image_token_types(trainer: ConstructedTrainer, ids: torch.Tensor, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token types (N, S) that TRL makes of whole rows (N, S) in which tools have returned images."""
    token = trainer._image_pad_token_id
    types = torch.zeros_like(ids) if token is None else (ids == token).to(ids.dtype)
    return {"mm_token_type_ids" if "image_grid_thw" in fields else "token_type_ids": types}
