"""The pass that measures the completions of a rollout, and what rewards get of it."""

from typing import Any

from vgr_trl.batch.inputs import build_scoring_batch
from vgr_trl.signals import Measurement, signals_of_generation
from vgr_trl.signals.named import add_named, named_columns, named_metrics
from vgr_trl.signals.reward_columns import attention_metrics, measure_segments, reward_columns
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout


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
