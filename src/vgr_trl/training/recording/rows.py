"""Rows of a rollout batch as completions of a record: from tensors to text, numbers and thumbnails."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

import torch
from PIL import Image

from vgr_trl.credit import attention_weights
from vgr_trl.reporting.records.format import Completion
from vgr_trl.reporting.records.pieces import prompt_text, token_pieces
from vgr_trl.reporting.views.markdown.sections import Segments, Summary
from vgr_trl.signals import AttentionMass, RolloutSignals, token_vision_gain_ratio
from vgr_trl.signals.ratios import late_layers
from vgr_trl.signals.reward_columns import QUANTITIES, measure_segments, reward_columns

_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(QUANTITIES)})")


@dataclass
class RecordedRow:
    """A completion on its way to the process that writes: `thumbnails` belong to `completion.images`, in order."""

    place: int
    completion: Completion
    thumbnails: list[Image.Image | None]  # then those of the perturbed images, if there are


def rows_to_record(samples: int, num_generations: int, total: int) -> list[int]:
    """Return which of all rows of a rollout batch are recorded: the first two of each prompt, prompt by prompt.

    Two completions of a prompt can be compared; a third tells less than another prompt.

    Args:
        samples: wanted rows.
        num_generations: completions per prompt.
        total: rows of all processes.
    """
    order = sorted(range(total), key=lambda row: (row % num_generations // 2, row // num_generations, row))
    return sorted(order[:samples])


def texts_of_row(
    batch: Mapping[str, Any],
    row: int,
    decode: Callable[..., str],
    pad_token_id: int,
    vision_token_ids: Sequence[int],
) -> dict[str, Any]:
    """Return prompt, text and tokens of a row of TRL's batch; the mask of a truncated completion may be empty.

    Args:
        batch: with `prompt_ids`, `prompt_mask`, `completion_ids` and `completion_mask`, (N, P) and (N, T).
        row: in [0, N).
        decode: as a tokenizer's.
        pad_token_id: token behind completions.
        vision_token_ids: placeholder tokens of images.
    """
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    ids = batch["completion_ids"][row].tolist()
    length = int(batch["completion_mask"][row].sum())
    if length == 0:
        length = max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)

    def exactly(tokens: list[int]) -> str:
        return decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return {
        "prompt": prompt_text(prompt, vision_token_ids, exactly),
        "text": decode(ids[:length], skip_special_tokens=True),
        "tokens": token_pieces(ids[:length], exactly),
    }


def question_id(prompt: str, images: bytes) -> str:
    """Return what is the same for the same prompt with the same images: 16 hexadecimal digits."""
    return sha1(prompt.encode("utf-8", "replace") + b"\0" + images, usedforsecurity=False).hexdigest()[:16]


def signals_of_row(signals: RolloutSignals, row: int) -> RolloutSignals:
    """Return the signals of one row, on the CPU."""
    one = slice(row, row + 1)
    mass = signals.attention
    return RolloutSignals(
        signals.logps[one].cpu(),
        signals.entropies[one].cpu(),
        signals.mask[one].cpu(),
        None if mass is None else AttentionMass(
            mass.vision[:, one].cpu(), mass.instruction[:, one].cpu(), mass.num_vision[one].cpu(),
            mass.num_instruction[one].cpu(), mass.mask[one].cpu(),
        ),
        None if signals.dependency is None else signals.dependency[one].cpu(),
    )  # fmt: skip


def measures_of_row(signals: RolloutSignals, length: int, options: Any) -> dict[str, Any]:
    """Return what was measured of a completion, as `Completion` has it: lists of `length` numbers, and metrics.

    Args:
        signals: of one row, (1, T).
        length: tokens of the completion, at most T.
        options: `DAPOConfig`.
    """
    measured: dict[str, Any] = {}
    for name, values in (
        ("logps", signals.logps),
        ("entropies", signals.entropies),
        ("dependency", signals.dependency),
    ):
        if values is not None and not values.isnan().all():
            measured[name] = values[0, :length].tolist()
    mass = signals.attention
    if mass is not None:
        layers = late_layers(len(mass.vision), options.attention_segments)
        measured["vgr"] = token_vision_gain_ratio(mass, layers)[0, :length].tolist()
        columns = reward_columns(measure_segments(mass, options.attention_segments, options.mdi_balance_ratio))
        measured["metrics"] = columns["attention_metrics"][0]
        if options.token_weights:
            measured["weights"] = attention_weights(mass, signals.mask, options)[0, :length].tolist()
    return measured


def accuracy_name(names: Sequence[str]) -> str | None:
    """Return the name of the reward that says whether a completion is right; None if there is none."""
    return next((name for name in names if name.startswith("accuracy")), None)


def summary_of(
    rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor, metrics: Mapping[str, float]
) -> Summary:
    """Return a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN where one does not apply.
        names: of the functions.
        weights: of the functions, (number of functions,).
        metrics: of the batch, by the names under which they are logged.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=1, keepdim=True)  # (N, 1)
    columns = torch.cat([rewards, total], dim=1).double().cpu().unbind(dim=1)
    statistics = {name: _mean_and_std(column) for name, column in zip([*names, "total"], columns, strict=True)}
    success = None
    if (accuracy := accuracy_name(names)) is not None:
        judged = columns[list(names).index(accuracy)]
        judged = judged[~judged.isnan()]
        success = (judged == 1).double().mean().item() if len(judged) else None
    segments: Segments = {}
    for name, value in metrics.items():
        if (found := _SEGMENT_METRIC.fullmatch(name)) is not None:
            segments.setdefault(found[1], {})[found[2]] = value
    credit: dict[str, float | None] = {
        name: value for name, value in metrics.items() if name.startswith("token_weight_") or "token_fraction" in name
    }
    return Summary(len(rewards), statistics, success, segments, credit)


def _mean_and_std(values: torch.Tensor) -> tuple[float | None, float | None]:
    values = values[~values.isnan()]
    mean = values.mean().item() if len(values) else None
    return mean, values.std().item() if len(values) > 1 else None
