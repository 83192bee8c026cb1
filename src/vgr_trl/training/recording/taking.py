"""Recorded rows as training leaves them: no more than what is gone a moment later, in memory of the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from PIL import Image

from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.batch.token_columns import map_signals
from vgr_trl.reporting.records.record import AttentionMap, Numbers
from vgr_trl.training.recording.pictures import Pictures, grids_of_row, images_of_row, quantised
from vgr_trl.training.rollout import Rollout


@dataclass
class TakenRow:
    """A row of a rollout batch that becomes a completion of a record.

    Attributes:
        place: among the rows of all processes.
        group: number of its prompt.
        prompt, completion: tokens, without padding.
        pictures: of the prompt; called by the thread that writes, or called already, before they are sent.
        perturbed: images as they were perturbed for the dependency.
        attention: over the vision tokens.
        changes: of the log-probabilities when images are perturbed.
        solution: of the data.
        earned: what the reward functions gave, NaN where one does not apply.
        advantage, advantages: of the completion, and of its tokens as the loss reads them; None: not trained on.
        replaced: whether another group took its place.
    """

    place: int
    group: int
    prompt: list[int]
    completion: list[int]
    pictures: Callable[[], Pictures] | Pictures
    solution: Any
    earned: list[float]
    advantage: float
    perturbed: list[Image.Image] = field(default_factory=list)
    attention: AttentionMap | None = None
    changes: Numbers | None = None
    advantages: Numbers | None = None
    replaced: bool = False


@dataclass
class TakenRows:
    """The recorded rows of one process, and their signals (R, T) on the CPU; None: nothing was measured."""

    rows: list[TakenRow]
    signals: RolloutSignals | None


def take_rows(
    rollout: Rollout, first: int, num_generations: int, pad_token_id: int, merge_size: int | None
) -> TakenRows:
    """Return the recorded rows of a judged rollout, before groups are replaced and credit is spread.

    Args:
        first: place of its first row among those of all.
        merge_size: patches per vision token along a side, where processors of the Qwen family have one.
    """
    chosen = list(rollout.recorded or ())
    if not chosen:
        return TakenRows([], None)
    batch = rollout.batch
    signals = rollout.signals
    if signals is not None:
        signals = map_signals([signals], lambda of_rows: of_rows[0][chosen].cpu())
    counts = [None] * len(chosen)
    if signals is not None and signals.attention is not None:
        counts = signals.attention.num_vision.tolist()
    prompts = zip(*(batch[name][chosen].tolist() for name in ("prompt_ids", "prompt_mask")), strict=True)
    completions = zip(*(batch[name][chosen].tolist() for name in ("completion_ids", "completion_mask")), strict=True)
    advantages = batch["advantages"][chosen].tolist()
    assert rollout.rewards is not None
    earned = rollout.rewards[[first + row for row in chosen]].tolist()
    changes = None if rollout.changes is None else rollout.changes[chosen].tolist()
    pictures: dict[int, Callable[[], Pictures]] = {}
    taken = []
    for index, (row, prompt, completion) in enumerate(zip(chosen, prompts, completions, strict=True)):
        group = (first + row) // num_generations
        grids = grids_of_row(batch, row, merge_size, counts[index])
        data, ids = rollout.rows[row], without_padding(completion[0], completion[1], pad_token_id)
        attention = (rollout.maps or {}).get(row)
        taken.append(
            TakenRow(
                place=first + row,
                group=group,
                prompt=[token for token, counts_in in zip(*prompt, strict=True) if counts_in],
                completion=ids,
                # The completions of a prompt were shown the same images.
                pictures=pictures.setdefault(group, cache(partial(images_of_row, data, grids))),
                solution=data.get("solution"),
                earned=earned[index],
                advantage=advantages[index],
                perturbed=[] if rollout.perturbed_images is None else list(rollout.perturbed_images[row]),
                attention=None if attention is None else quantised(attention.mean(0)[: len(ids)], grids),
                changes=None if changes is None else changes[index][: len(ids)],
            )
        )
    return TakenRows(taken, signals)


def with_pictures(taken: TakenRows) -> TakenRows:
    """Return rows that can be sent to another process, their images as small as they are recorded."""
    for row in taken.rows:
        if callable(row.pictures):
            row.pictures = row.pictures()
    return taken


def without_padding(ids: Sequence[int], mask: Sequence[int], pad_token_id: int) -> list[int]:
    """Return the tokens of a completion; the mask of a truncated one may be empty, then they end before the padding."""
    length = sum(mask) or max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[:length])


def add_credit(taken: TakenRows, chosen: Rollout, before: torch.Tensor, after: torch.Tensor) -> None:
    """Add to recorded rows what the loss reads of them.

    Args:
        before: its advantages, (N,), or (N, T) of a critic, whose mean is recorded as the completion's.
        after: likewise with credit spread, (N,) or (N, T).
    """
    rows = list(chosen.recorded or ())
    if not rows:
        return
    for row, advantage, credit in zip(taken.rows, before[rows].tolist(), after[rows].tolist(), strict=True):
        if row.group in chosen.replaced:
            row.replaced = True
            continue
        length = len(row.completion)
        if isinstance(advantage, list):
            advantage = sum(advantage[:length]) / max(length, 1)
        row.advantage = advantage
        row.advantages = credit[:length] if isinstance(credit, list) else [credit] * length
