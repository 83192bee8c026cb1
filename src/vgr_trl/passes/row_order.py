"""Order the rows of a rollout: completions of a prompt, and rows of similar length, share micro-batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vgr_trl.passes.loss_mask import group_by_length
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sharing.lending import PROMPT_GROUP, READ_AGAIN, find_read_again, shuffle_whole_groups, sort_by_group
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.prefix_split import is_image_token


def plan_shuffle(trainer: ConstructedTrainer) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return a replacement for TRL's `shuffle_sequence_dict`, or None."""
    args, features, lends = trainer.args, trainer.features, trainer.shared_passes.lending is not None
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    window = args.per_device_train_batch_size * min(accumulated, generated)  # rows of a rollout in an optimizer step
    if not (lends or features.group_by_length.enabled or features.regroup.enabled):
        return None

    def arrange(batch: dict[str, Any], order: Sequence[int], groups: Sequence[int]) -> list[int]:
        if features.group_by_length.enabled:
            extents = trainer.passes.skipping.extents(batch)
            lengths = [extent.completion if extent.runs else 0 for extent in extents]
            return group_by_length(order, groups, lengths, window)
        return sort_by_group(order, groups) if features.regroup.enabled else list(order)

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        is_image = partial(is_image_token, config=causal_model(trainer.model).config) if trainer.tools else None
        batch = shuffle_whole_groups(batch, partial(arrange, batch), is_image)
        if lends and not _can_close_early(trainer):
            batch[READ_AGAIN] = [True] * len(batch[PROMPT_GROUP])
        elif lends:
            runs = [extent.runs for extent in trainer.passes.skipping.extents(batch)]
            cuts_rollout = bool(accumulated % generated and generated % accumulated)
            groups, size = batch[PROMPT_GROUP], args.per_device_train_batch_size
            batch[READ_AGAIN] = find_read_again(groups, runs, size, len(groups) if cuts_rollout else window)
        return batch

    return shuffle


def _can_close_early(trainer: ConstructedTrainer) -> bool:
    """Whether a prompt may run backward before the micro-batch in which processes exchange their gradients.

    That micro-batch may not run the vision tower, whose gradients DDP then leaves out unless it looks for them.
    """
    alone = trainer.accelerator.num_processes == 1 or not trainer._is_vlm
    return alone or bool(trainer.args.ddp_find_unused_parameters)
