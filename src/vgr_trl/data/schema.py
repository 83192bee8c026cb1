"""What a row needs before it can be trained on, and why a row is left out.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image` or `images` unless it is about text alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, Image, IterableDataset, List
from tqdm.auto import tqdm
from transformers.utils import logging

from vgr_trl.data.columns import image_columns
from vgr_trl.data.images import open_image
from vgr_trl.data.prompts import SYSTEM_PROMPT, build_prompt
from vgr_trl.errors import DataError, RewardError
from vgr_trl.rewards import resolve_solution

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out."""

    split: str
    row: int
    id: Any
    reason: str


def row_problem(row: Mapping[str, Any], *, root: Path = Path(), needs_solution: bool = True) -> str | None:
    """Return why `row` cannot be used, in one sentence, or None if it can.

    Args:
        row: with undecoded or decoded images.
        root: folder that relative image paths start from.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
    """
    if not row.get("prompt") and not (isinstance(row.get("problem"), str) and row["problem"].strip()):
        return "it has neither a prompt nor a problem"
    if needs_solution:
        stated = row.get("solution") if row.get("solution") is not None else row.get("label_idx")
        try:
            resolve_solution(stated, row.get("choices"))
        except RewardError as error:
            return str(error)
    try:
        for value in _image_values(row):
            open_image(value, root)
    except DataError as error:
        return str(error)
    return None


def _image_values(row: Mapping[str, Any]) -> Sequence[Any]:
    if row.get("images") is not None:
        return row["images"]
    return [row["image"]] if row.get("image") is not None else []


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> tuple[Dataset | IterableDataset, list[SkippedRow]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Every image is decoded once to see whether it can be; one process does it and tells the others. Of a stream the rows
    are checked as they are read, and the list is empty.

    Args:
        dataset: rows as described at the top of this file.
        split: name of the split, for messages.
        root: folder that relative image paths start from.
        needs_solution: whether a row must have a usable `solution` or `label_idx`.
        system_prompt: put before each `problem`; rows with a `prompt` of their own keep it.

    Raises:
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    if isinstance(dataset, IterableDataset):
        return _prepare_stream(dataset, root, needs_solution, system_prompt), []
    _require_columns(dataset, split, needs_solution)
    dataset = _with_image_features(dataset, root)
    reasons: list[dict[int, str]] = [{}]
    if PartialState().is_main_process:
        rows = tqdm(_without_decoding(dataset), desc=f"check rows ({split})", delay=3)
        reasons[0] = dict(_problems(rows, root, needs_solution))
    broadcast_object_list(reasons)
    ids = dataset["id"] if "id" in dataset.column_names else range(len(dataset))
    skipped = [SkippedRow(split, index, ids[index], reason) for index, reason in reasons[0].items()]
    if len(skipped) == len(dataset):
        raise DataError(
            f"None of the {len(dataset)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    if skipped:
        dataset = dataset.select([index for index in range(len(dataset)) if index not in reasons[0]])
    if "prompt" not in dataset.column_names:
        choices = dataset["choices"] if "choices" in dataset.column_names else [None] * len(dataset)
        prompts = [
            build_prompt(problem, options, system_prompt=system_prompt)
            for problem, options in zip(dataset["problem"], choices, strict=True)
        ]
        dataset = dataset.add_column("prompt", prompts)
    return dataset, skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path) -> None:
    """Write the rows left out to `path`, one JSON object per line, and warn with the count and the first reason."""
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row), default=str) + "\n" for row in skipped), encoding="utf-8")
    logger.warning(
        f"Left out {len(skipped)} rows that cannot be used, listed with their reasons in {path}; the first: "
        f"{skipped[0].split} row {skipped[0].row}: {skipped[0].reason}."
    )


def _require_columns(dataset: Dataset, split: str, needs_solution: bool) -> None:
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    names = dataset.column_names
    if not {"prompt", "problem"} & set(names):
        raise DataError(f"The {split} data has the columns {names}: it needs `prompt`, or `problem` with `solution`.")
    if needs_solution and not {"solution", "label_idx"} & set(names):
        raise DataError(
            f"The {split} data has the columns {names}: the accuracy reward needs `solution` (letter, index or text)."
        )


def _problems(rows: Any, root: Path, needs_solution: bool) -> Iterator[tuple[int, str]]:
    for index, row in enumerate(rows):
        if reason := row_problem(row, root=root, needs_solution=needs_solution):
            yield index, reason


def _with_image_features(dataset: Dataset, root: Path) -> Dataset:
    """Turn columns of image paths, as JSONL has them, into columns that decode on access."""
    for name in image_columns(dataset):
        feature = dataset.features[name]
        is_list = isinstance(feature, List)
        if getattr(feature.feature if is_list else feature, "dtype", None) == "string":
            paths = [_under(root, value) for value in dataset[name]]
            target = List(Image()) if is_list else Image()
            dataset = dataset.remove_columns(name).add_column(name, paths).cast_column(name, target)
    return dataset


def _under(root: Path, value: str | list[str] | None) -> Any:
    if value is None:
        return None
    return str(root / value) if isinstance(value, str) else [str(root / path) for path in value]


def _without_decoding(dataset: Dataset) -> Dataset:
    for name in image_columns(dataset):
        feature = dataset.features[name]
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def _prepare_stream(
    dataset: IterableDataset, root: Path, needs_solution: bool, system_prompt: str | None
) -> IterableDataset:
    def usable(row: Mapping[str, Any]) -> bool:
        reason = row_problem(row, root=root, needs_solution=needs_solution)
        if reason:
            logger.warning(f"Left out a row of the stream (id {row.get('id')}): {reason}.")
        return reason is None

    def add_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
        if row.get("prompt"):
            return dict(row)
        return {**row, "prompt": build_prompt(row["problem"], row.get("choices"), system_prompt=system_prompt)}

    return dataset.filter(usable).map(add_prompt)
