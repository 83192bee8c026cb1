"""Signals of a rollout: the scoring pass's `Want`, signals and reward columns from its scores, and token credit.

Where only metrics read the attention, a sample of the rows is measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn import functional

from vgr_trl.batch import Batch, Prompts, build_batch
from vgr_trl.credit import REWARD_FILE_WEIGHTS, shape_advantages, stack_weights
from vgr_trl.errors import RewardError
from vgr_trl.passes.run_pass import score
from vgr_trl.patches.trl import mark_images
from vgr_trl.patching import keep_random_state
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.named import (
    PER_IMAGE,
    SINGLE_COLUMNS,
    RolloutSignals,
    add_named,
    attention_metrics,
    build_unmeasured_signals,
    columns_to_signals,
    named_columns,
    named_metrics,
    reward_columns,
    signals_to_columns,
)
from vgr_trl.signals.perturbation import derive_seed
from vgr_trl.signals.ratios import AttentionMass, late_layers, measure_segments
from vgr_trl.signals.scoring import AttentionPlan, Scores, Want
from vgr_trl.views.regions import region_mask

ColumnsAndMetrics = tuple[dict[str, list[Any]], dict[str, float]]
MAX_ATTENTION_BYTES = 2**29  # attention kept per token on the device; 10 rows of 1,024 tokens of a 7 B model


def completion_batch(run: Run, rollout: Rollout, completion_ids: list[list[int]]) -> Batch:
    """Build the batch of a rollout's scoring pass before TRL builds its own.

    Args:
        run: tokenizer, vision tokens and padding.
        rollout: prompts and turns.
        completion_ids: tokens of each completion.
    """
    prompts, turns = cast("Prompts", rollout.prompts), rollout.turns
    if turns is not None and turns.fields:
        prompts = replace(prompts, images=turns.images, fields=turns.fields)
    batch = build_batch(
        prompts,
        completion_ids,
        pad_token_id=run.tokenizer.pad_token_id,
        vision_token_ids=run.measurement.vision_token_ids,
        valid=[ids[-1] in run.end_tokens for ids in completion_ids] if run.args.mask_truncated_completions else None,
        by_policy=None if turns is None else turns.by_policy,
        pad_to_multiple_of=run.pad_to_multiple_of,
    )
    return mark_images(run.model, batch) if turns is not None and turns.fields else batch


def wanted_scores(run: Run, rollout: Rollout, batch: Batch, recorded: Sequence[int] | None = None) -> Want:
    """Build the `Want` of a rollout's scoring pass from all readers of its signals.

    Args:
        run: options and measurements.
        rollout: the rollout of the batch.
        batch: completions that the pass scores.
        recorded: rows of `batch` that are recorded; None: the rollout's.
    """
    args, measurement = run.args, run.measurement
    attention, reads = None, (args.hidden_similarity_layer, args.hidden_similarity_over)
    similarity = reads if measurement.needs("similarity") else None
    measures = measurement.needs("attention") and (rollout.generated is None or bool(rollout.recorded))
    if measures or similarity is not None:
        late = late_layers(measurement.layers, args.attention_segments) if measures else []
        vision_tokens = torch.tensor(measurement.vision_token_ids, device=batch.prompt_ids.device)
        vision = torch.isin(batch.ids, vision_tokens) & batch.unwritten  # (N, P + T)
        attention = AttentionPlan(
            measurement.vision_token_ids,
            measurement.special_token_ids,
            mass=measures,
            region=region_mask(run, rollout, batch.prompt_ids) if measures else None,
            keep_rows=_limit_kept_rows(vision, batch.length * len(late), recorded or rollout.recorded or ()),
            keep_layers=late,
            measure_prompt=rollout.generated is None,
            similarity=similarity,
            per_image=measurement.needs("per_image"),
        )
    return Want(
        entropies=True,
        hidden=(args.needs_full_kl and args.penalises_kl) or measurement.needs("shift"),
        attention=attention,
    )


def make_signals(scores: Scores, generated: RolloutSignals | None) -> RolloutSignals:
    """Build the signals of a rollout from the scores of a pass.

    Args:
        scores: scores with entropies.
        generated: signals measured in generation; their attention replaces the pass's. None: not measured.
    """
    mass = scores.attention if generated is None else pad_signals(generated, scores.mask).attention
    entropies: Any = scores.entropies
    return RolloutSignals(scores.logps.float(), entropies.float(), scores.mask, mass, similarity=scores.similarity)


def _limit_kept_rows(vision: torch.Tensor, queries: int, rows: Sequence[int]) -> list[int]:
    """Greedily choose rows while their attention per token fits into `MAX_ATTENTION_BYTES`.

    Args:
        vision: (N, P + T) bool, vision tokens.
        queries: queries of a row, summed over layers.
        rows: candidate rows, in order of priority.
    """
    fitting, used = [], 0
    for row in rows:
        size = 4 * queries * int(vision[row].sum())
        if used + size <= MAX_ATTENTION_BYTES:
            fitting.append(row)
            used += size
    return fitting


def pad_signals(generated: RolloutSignals, mask: torch.Tensor) -> RolloutSignals:
    """Pad signals with zeros, or cut them, from T' tokens to the T tokens of `mask`, (N, T)."""
    mass, mask = generated.measured("attention"), mask.to(generated.mask.device)
    missing = mask.size(1) - generated.mask.size(1)  # TRL may have cut or padded the longest completion
    values = generated.logps, generated.entropies, mass.vision, mass.instruction
    logps, entropies, vision, instruction = (functional.pad(tensor, (0, missing)) * mask for tensor in values)
    return RolloutSignals(logps, entropies, mask, replace(mass, vision=vision, instruction=instruction, mask=mask))


def signals_as_columns(run: Run, rollout: Rollout) -> ColumnsAndMetrics:
    """Add the named signals to the rollout; return the signal columns for rewards, and metrics."""
    signals, gather = cast("RolloutSignals", rollout.signals), run.accelerator.gather
    new = add_named(run.measurement.named, signals)
    columns: dict[str, list[Any]] = {**named_columns(new, signals)}
    metrics = named_metrics(new, signals, gather)
    if signals.attention is None:
        return columns, metrics
    prompt_mass = None if rollout.scores is None else rollout.scores.prompt_attention
    of_attention, more = attention_columns(run, signals.attention, prompt_mass)
    columns |= of_attention | {"mdi_balance_ratio": [run.args.mdi_balance_ratio] * len(rollout.rows)}
    if rollout.scores is not None and rollout.scores.per_image is not None:
        columns |= {PER_IMAGE: rollout.scores.per_image}
    return columns, more | metrics


def attention_columns(run: Run, mass: Any, prompt_mass: AttentionMass | None) -> ColumnsAndMetrics:
    """Return the `SIGNAL_COLUMNS` of completions, and metrics over all processes.

    Args:
        run: segments of layers, and the ratio of the MDI balance.
        mass: attention of the completions' tokens.
        prompt_mass: attention of the prompts' instruction tokens; None on every process: not measured.
    """
    segmentation = run.args.attention_segments, run.args.mdi_balance_ratio
    segments = measure_segments(mass, *segmentation)
    of_prompt = None if prompt_mass is None else measure_segments(prompt_mass, *segmentation)
    return reward_columns(segments), attention_metrics(segments, run.accelerator.gather, of_prompt)


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


def measure_sample(run: Run, rollout: Rollout, completion_ids: list[list[int]]) -> ColumnsAndMetrics:
    """Measure attention on some rows of a rollout; return columns, with None for other rows, and metrics.

    The signals of other rows are NaN. Every process measures equally many rows, because sharded parameters need equally
    many forward calls.

    Args:
        run: scores the rows.
        rollout: gets the signals and scores.
        completion_ids: tokens of each completion.
    """
    args, accelerator, count = run.args, run.accelerator, len(completion_ids)
    draw = derive_seed(args.seed, run.step, 0)
    rows = choose_sample(count, run.completions_per_prompt, rollout.first, rollout.recorded or (), draw)
    most = int(accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).max())
    rows = sorted([*rows, *(row for row in range(count) if row not in rows)][:most])
    batch = completion_batch(run, rollout, completion_ids)
    part = batch.take(rows)
    recorded = [rows.index(row) for row in rollout.recorded or ()]
    with keep_random_state(accelerator.device):
        scores = score(run, part, wanted_scores(run, rollout, part, recorded))
    rollout.signals = _spread(make_signals(scores, None), rows, batch.completion_mask.bool())
    maps = {rows[row]: kept for row, kept in (scores.maps or {}).items()}
    rollout.scores = Scores(rollout.signals.logps, rollout.signals.mask, maps=maps)
    columns, metrics = attention_columns(run, scores.attention, scores.prompt_attention)
    by_row = {name: dict(zip(rows, columns[name], strict=True)) for name in SINGLE_COLUMNS}
    return {name: [*map(values.get, range(count))] for name, values in by_row.items()}, metrics


def _spread(signals: RolloutSignals, rows: Sequence[int], mask: torch.Tensor) -> RolloutSignals:
    """Scatter the signals of `rows`, at most T tokens long, into all rows of `mask`, (N, T); NaN or 0 elsewhere."""
    columns, mask = signals_to_columns(signals), mask.to(signals.mask.device)
    for name, values in columns.items():
        undefined = torch.nan if values.is_floating_point() else 0
        if values.ndim > 1:
            values = functional.pad(values, (0, mask.size(1) - values.size(-1)), value=undefined)
        columns[name] = values.new_full((len(mask), *values.shape[1:]), undefined)
        columns[name][rows] = values
    columns |= {"signals.mask": mask, "signals.attention.mask": mask}
    return cast("RolloutSignals", columns_to_signals(columns))


def keep_returned_weights(rollout: Rollout, token_weights: bool) -> None:
    """Add the token weights that reward files have returned to a rollout's signals.

    Args:
        rollout: a rewarded rollout.
        token_weights: whether the option of this name is on.

    Raises:
        RewardError: a file has returned weights, but token weights are off.
    """
    returned = rollout.token_weights or []
    missing = torch.tensor([row is None for row in returned], dtype=torch.bool)
    if token_weights:
        if rollout.signals is not None and returned:  # on all processes, whichever of them have weights
            mask = rollout.batch.valid
            weights = stack_weights([mask.new_ones(mask.size(1)) if row is None else row for row in returned], mask)
            weights = weights.masked_fill(missing.to(mask.device).unsqueeze(1), torch.nan)
            rollout.signals.extra[REWARD_FILE_WEIGHTS] = weights
    elif not missing.all():
        cure = "add --token_weights (algorithm.enable_token_weights=true), or let it return none"
        raise RewardError(f"A reward file returned token_weights, but token_weights is off: {cure}.")


def apply_token_credit(run: Run, rollout: Rollout) -> dict[str, float]:
    """Turn a rollout's advantages (N,) into (N, T) by the rules of credit; return metrics."""
    signals = rollout.signals or build_unmeasured_signals(rollout.batch.valid)
    rows, device = len(signals.mask), signals.mask.device
    first = run.accelerator.process_index * rows
    advantages, metrics = shape_advantages(
        cast("torch.Tensor", rollout.batch.advantages),
        signals,
        run.args,
        shaped=rollout.with_gradient.to(device),
        groups=torch.arange(first, first + rows, device=device) // run.completions_per_prompt,
        gather=run.accelerator.gather,
        completion_ids=rollout.batch.completion_ids,
        weights_of=rollout.credit,
    )
    rollout.batch = replace(rollout.batch, advantages=advantages)
    return metrics
