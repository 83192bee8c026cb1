"""Recorded rows as completions of a record: from tokens and tensors to text, numbers and thumbnails."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha1
from itertools import islice
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from vgr_trl.config import DAPOConfig
from vgr_trl.credit import attention_weights
from vgr_trl.reporting.records.pieces import prompt_text, token_pieces
from vgr_trl.reporting.records.record import Completion
from vgr_trl.reporting.records.thumbnails import shrunk
from vgr_trl.reporting.views.markdown.sections import Segments, Summary
from vgr_trl.signals import RolloutSignals, token_vision_gain_ratio
from vgr_trl.signals.ratios import late_layers
from vgr_trl.signals.reward_columns import QUANTITIES, measure_segments, reward_columns
from vgr_trl.training.recording.taking import TakenRow, TakenRows

_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(QUANTITIES)})")


@dataclass
class RecordedRow:
    """A completion with the thumbnails of `completion.images`, in order, then of these as they were perturbed."""

    place: int
    completion: Completion
    thumbnails: list[Image.Image | None]


def rows_to_record(samples: int, num_generations: int, total: int) -> list[int]:
    """Return which of all rows of a rollout batch are recorded: the first two of each prompt, prompt by prompt.

    Two completions of a prompt can be compared; a third tells less than another prompt.

    Args:
        total: rows of all processes.
    """
    return sorted(islice(_pair_by_pair(num_generations, total), min(samples, total)))


def _pair_by_pair(num_generations: int, total: int) -> Iterator[int]:
    for pair in range(0, num_generations, 2):
        for start in range(0, total, num_generations):
            yield from range(start + pair, min(start + pair + 2, start + num_generations, total))


class OwnDecoder:
    """Decodes with a copy of a tokenizer, made when it is first used.

    A tokenizer that one thread pads with must not be used by another: its Rust part refuses both.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._own: Any = None

    def __call__(self, tokens: list[int], **options: Any) -> str:
        if self._own is None:
            self._own = copy.deepcopy(self._tokenizer)
        return str(self._own.decode(tokens, **options))


@dataclass(frozen=True)
class Completing:
    """What it takes to make completions of recorded rows.

    Attributes:
        decode: as a tokenizer's.
        vision_token_ids: placeholder tokens of images.
        options: `DAPOConfig`.
        reward_names: of the functions.
        reward_weights: of this step.
    """

    decode: Callable[..., str]
    vision_token_ids: Sequence[int]
    options: DAPOConfig
    reward_names: Sequence[str]
    reward_weights: Sequence[float]

    def rows(self, taken: TakenRows) -> list[RecordedRow]:
        """Return the rows of one process as completions."""
        lengths = [len(row.completion) for row in taken.rows]
        measured: list[dict[str, Any]] = [{} for _ in taken.rows]
        if taken.signals is not None:
            measured = measures_of_rows(taken.signals, lengths, self.options)
        return [self._row(*pair) for pair in zip(taken.rows, measured, strict=True)]

    def _row(self, row: TakenRow, measured: dict[str, Any]) -> RecordedRow:
        recorded, thumbnails, digest = row.pictures() if callable(row.pictures) else row.pictures
        exactly = partial(self.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        prompt = prompt_text(row.prompt, self.vision_token_ids, exactly)
        if row.attention is not None:
            measured["attention"] = row.attention
        if row.changes is not None and recorded:
            measured["changes"] = row.changes
        down = self.options.token_weights_positive_only and row.advantages is not None and row.advantage < 0
        if measured.get("weights") is not None and down:
            measured["weights"] = [1.0] * len(row.completion)
        completion = Completion(
            question=question_id(prompt, digest),
            group=row.group,
            prompt=prompt,
            text=self.decode(row.completion, skip_special_tokens=True),
            tokens=token_pieces(row.completion, exactly),
            solution=None if row.solution is None else str(row.solution),
            advantage=row.advantage,
            advantages=row.advantages,
            replaced=row.replaced,
            images=[replace(image) for image in recorded],
            **measured,
            **self._rewards(row.earned),
        )
        return RecordedRow(row.place, completion, [*thumbnails, *map(shrunk, row.perturbed)])

    def _rewards(self, earned: Sequence[float]) -> dict[str, Any]:
        rewards = dict(zip(self.reward_names, earned, strict=True))
        right = rewards.get(accuracy_name(self.reward_names) or "")
        weighted = (value * weight for value, weight in zip(earned, self.reward_weights, strict=True))
        return {
            "rewards": rewards,
            "reward": sum(value for value in weighted if not math.isnan(value)),
            "correct": None if right is None or math.isnan(right) else right == 1,
        }


def question_id(prompt: str, images: bytes) -> str:
    """Return what is the same for the same prompt with the same images: 16 hexadecimal digits."""
    return sha1(prompt.encode("utf-8", "replace") + b"\0" + images, usedforsecurity=False).hexdigest()[:16]


def measures_of_rows(signals: RolloutSignals, lengths: Sequence[int], options: DAPOConfig) -> list[dict[str, Any]]:
    """Return what was measured of completions, as `Completion` has it: lists of as many numbers as tokens, and metrics.

    Args:
        signals: of R rows, (R, T).
        lengths: tokens of each completion, at most T.
    """
    columns = {"logps": signals.logps, "entropies": signals.entropies, "dependency": signals.dependency}
    metrics: list[Any] = [None] * len(lengths)
    if (mass := signals.attention) is not None:
        columns["vgr"] = token_vision_gain_ratio(mass, late_layers(len(mass.vision), options.attention_segments))
        segments = measure_segments(mass, options.attention_segments, options.mdi_balance_ratio)
        metrics = reward_columns(segments)["attention_metrics"]
        if options.token_weights:
            columns["weights"] = attention_weights(mass, signals.mask, options)
    rows = {name: values.tolist() for name, values in columns.items() if values is not None}
    kept_as_nan = {"vgr", "weights"}  # the others are NaN throughout where they were not measured
    return [
        {
            name: values[index][:length]
            for name, values in rows.items()
            if name in kept_as_nan or not all(map(math.isnan, values[index]))
        }
        | ({} if metrics[index] is None else {"metrics": metrics[index]})
        for index, length in enumerate(lengths)
    ]


def accuracy_name(names: Sequence[str]) -> str | None:
    """Return the name of the reward that says whether a completion is right; None if there is none."""
    return next((name for name in names if name.startswith("accuracy")), None)


def summary_of(
    rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor, metrics: Mapping[str, float]
) -> Summary:
    """Return a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN where one does not apply.
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
