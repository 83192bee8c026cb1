"""Turns of completions that call tools: guarded tools, their images and the counts that rewards read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vgr_trl.data.prompts import special_tokens
from vgr_trl.errors import DataError
from vgr_trl.patches.trl import readable_calls
from vgr_trl.patching import patched_attribute
from vgr_trl.rollout import ConstructedTrainer, Rollout, describe_row
from vgr_trl.scoring_inputs import ImagesOfRows, Turns
from vgr_trl.tool_guard import ToolGuard
from vgr_trl.views.turns import process_images


@contextmanager
def guarded(trainer: ConstructedTrainer) -> Iterator[None]:
    """Keep the run alive in this block whatever the policy writes to tools and whatever they return."""
    processor: Any = trainer.processing_class
    guard = ToolGuard(special_tokens(processor), processor.image_processor if trainer._is_vlm else None)
    with ExitStack() as stack:
        stack.enter_context(readable_calls(guard.clean))
        for kind in ("_sync_tool_dicts", "_async_tool_dicts"):
            guarded_tools = [{name: guard.wrap(tool) for name, tool in row.items()} for row in vars(trainer)[kind]]
            stack.enter_context(patched_attribute(trainer, kind, guarded_tools))
        yield


def collect_turns(trainer: ConstructedTrainer, rollout: Rollout, generated: Sequence[Any]) -> Turns:
    """Return the turns of what TRL's `_generate` has returned for a rollout.

    Raises:
        DataError: a row has other image tokens than its images take.
    """
    prompt_ids, completion_ids, own, messages, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(own)]
    fields = process_images(trainer, images) if any(returned) and trainer._is_vlm else {}
    if "image_grid_thw" in fields:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        refuse_mismatch(trainer, rollout.rows, ids, images, fields["image_grid_thw"])
    return Turns(own, images, returned, fields, messages)


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
            found = f"{count} image tokens with its completion, but its {len(of_row)} images take {takes}"
            cure = "use a chat template that writes the images of tool messages"
            raise DataError(f"The {describe_row(row)} has {found}: {cure}.")


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Return the columns `TURN_COLUMNS` that rewards get: messages of the policy, of tools, and images of tools."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([each.count("assistant") for each in roles], [each.count("tool") for each in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))
