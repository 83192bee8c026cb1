"""Measure the attention of a sample of a rollout's rows, where only metrics and records read it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vgr_trl.passes.loss_mask import find_window, trim_inputs
from vgr_trl.patching import keep_random_state
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.signals.columns import (
    SINGLE_COLUMNS,
)
from vgr_trl.signals.perturbation import derive_seed
from vgr_trl.signals.ratios import AttentionMass
from vgr_trl.signals.rollout_signals import RolloutSignals
from vgr_trl.signals.scoring import Scores
from vgr_trl.wants import attention_columns, completion_inputs, make_signals, wanted_scores


def choose_sample(rows: int, size: int, first: int, recorded: Sequence[int], draw: int) -> list[int]:
    """Choose rows of this process: all recorded rows, and the rows of the first recorded row's group.

    Args:
        rows: completions of this process.
        size: G.
        first: number of the first row over all processes.
        recorded: recorded rows.
        draw: random number, at least 0, which chooses the group if no row is recorded.
    """
    group = (first + (recorded[0] if recorded else draw % rows)) // size
    return sorted({*recorded, *(row for row in range(rows) if (first + row) // size == group)})


def measure_sample(
    trainer: ConstructedTrainer, rollout: Rollout, completion_ids: list[list[int]]
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Measure the attention of a sample of a rollout's rows; return columns, None for other rows, and metrics.

    The signals of other rows are NaN. Every process measures equally many rows, because sharded parameters need equally
    many forward calls.

    Args:
        trainer: scores the rows.
        rollout: gets the signals and scores.
        completion_ids: tokens of each completion.
    """
    args, accelerator, count = trainer.args, trainer.accelerator, len(completion_ids)
    first, draw = accelerator.process_index * count, derive_seed(args.seed, trainer.state.global_step, 0)
    rows = choose_sample(count, trainer.completions_per_prompt, first, rollout.recorded or (), draw)
    most = int(accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).max())
    rows = sorted([*rows, *(row for row in range(count) if row not in rows)][:most])
    inputs = completion_inputs(trainer, rollout, completion_ids)
    mask = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].bool()
    written = torch.tensor([[len(completion_ids[row])] for row in rows]) > torch.arange(mask.size(1))  # (rows, T)
    prompts, multiple = inputs["attention_mask"][rows, : -mask.size(1)], trainer.pad_to_multiple_of or None
    window = replace(find_window(written, prompts, rows=False, padding=True, multiple=multiple), rows=rows)
    part = trim_inputs(inputs, window)
    recorded = [rows.index(row) for row in rollout.recorded or ()]
    with keep_random_state(accelerator.device):
        scores = trainer.score(part, wanted_scores(trainer, rollout, part, recorded))
    rollout.signals = _spread(make_signals(scores, None), rows, mask)
    maps = {rows[row]: kept for row, kept in (scores.maps or {}).items()}
    rollout.scores = Scores(rollout.signals.logps, rollout.signals.mask, maps=maps)
    columns, metrics = attention_columns(scores.attention, scores.prompt_attention, args, accelerator.gather)
    places = {row: place for place, row in enumerate(rows)}
    found = {
        name: [columns[name][places[row]] if row in places else None for row in range(count)] for name in SINGLE_COLUMNS
    }
    return found, metrics


def _spread(signals: RolloutSignals, rows: Sequence[int], mask: torch.Tensor) -> RolloutSignals:
    """Scatter the signals of some rows, of at most T tokens, to all rows of `mask`, (N, T); NaN elsewhere."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        every = values.new_full((*values.shape[:-2], *mask.shape), torch.nan)
        every[..., rows, : values.size(-1)] = values
        return every

    mask, mass = mask.to(signals.mask.device), signals.attention
    found = RolloutSignals(spread(signals.logps), spread(signals.entropies), mask)
    if mass is not None:
        index = torch.tensor(rows, device=mask.device)
        vision, instruction = (
            value.new_zeros(len(mask)).index_copy(0, index, value) for value in (mass.num_vision, mass.num_instruction)
        )
        found.attention = AttentionMass(spread(mass.vision), spread(mass.instruction), vision, instruction, mask)
    return found
