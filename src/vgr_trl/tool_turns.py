"""Turns of completions that call tools: guarded tools, their images and the counts that rewards read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vgr_trl.data.prompts import special_tokens
from vgr_trl.errors import DataError
from vgr_trl.patches.trl import readable_calls
from vgr_trl.patching import patched_attribute
from vgr_trl.rollout import ConstructedTrainer, describe_row
from vgr_trl.scoring_inputs import ImagesOfRows, Turns
from vgr_trl.tool_guard import ToolGuard
from vgr_trl.views.turns import process_images


@contextmanager
def guarded(trainer: ConstructedTrainer) -> Iterator[None]:
    """Guard the run in this block against malformed tool calls and results."""
    processor: Any = trainer.processing_class
    guard = ToolGuard(special_tokens(processor), processor.image_processor if trainer._is_vlm else None)
    with ExitStack() as stack:
        stack.enter_context(readable_calls(guard.clean))
        for kind in ("_sync_tool_dicts", "_async_tool_dicts"):
            guarded_tools = [{name: guard.wrap(tool) for name, tool in row.items()} for row in vars(trainer)[kind]]
            stack.enter_context(patched_attribute(trainer, kind, guarded_tools))
        yield


def collect_turns(
    rows: Sequence[Mapping[str, Any]], generated: Sequence[Any], processor: Any, image_token: int | None
) -> Turns:
    """Collect the turns of completions from the return value of TRL's `_generate`.

    Args:
        rows: rows of the data, one per completion.
        generated: return value of `_generate`.
        processor: processor of the model; None for a text model.
        image_token: placeholder token of images.

    Raises:
        DataError: the image tokens of a row do not match its images.
    """
    prompt_ids, completion_ids, own, messages, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(own)]
    fields = process_images(processor, images) if any(returned) and processor is not None else {}
    if "image_grid_thw" in fields:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        lengths = fields["image_grid_thw"].prod(-1) // getattr(processor.image_processor, "merge_size", 2) ** 2
        refuse_mismatch(rows, ids, images, lengths, image_token)
    return Turns(own, images, returned, fields, messages)


def refuse_mismatch(
    rows: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    images: ImagesOfRows,
    lengths: torch.Tensor,
    image_token: int | None,
) -> None:
    """Raise `DataError` if the image tokens of a row do not match its images.

    TRL 1.16 would train on all rows of the process without their images (`has_mismatch` in grpo_trainer.py).

    Args:
        rows: rows of the data.
        ids: tokens of each prompt and its completion.
        images: images of each row.
        lengths: tokens of each image, row by row, (images,).
        image_token: placeholder token of images.
    """
    wanted = iter(lengths.tolist())
    for row, tokens, of_row in zip(rows, ids, images, strict=True):
        takes, count = sum(next(wanted) for _ in of_row), [*tokens].count(image_token or -1)
        if count != takes:
            found = f"{count} image tokens with its completion, but its {len(of_row)} images take {takes}"
            cure = "use a chat template that writes the images of tool messages"
            raise DataError(f"The {describe_row(row)} has {found}: {cure}.")


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Count the policy's messages, the tools' messages and the tools' images, as the reward columns `TURN_COLUMNS`."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([each.count("assistant") for each in roles], [each.count("tool") for each in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))
