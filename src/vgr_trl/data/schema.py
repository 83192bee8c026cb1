"""What a row needs before it can be trained on, and why a row is left out.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image` or `images` unless it is about text alone.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, IterableDataset, List
from pyarrow.lib import ArrowException
from transformers.utils import logging

from vgr_trl.data.columns import image_columns, images_of
from vgr_trl.data.images import open_image
from vgr_trl.data.prompts import SYSTEM_PROMPT, build_prompt
from vgr_trl.data.scan import scan
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
    try:
        prompt = _prompt_of(row, None)
        if needs_solution:
            stated = row.get("solution") if row.get("solution") is not None else row.get("label_idx")
            resolve_solution(stated, row.get("choices"))
        images = images_of(row)
        if images and isinstance(prompt, str):
            return "its prompt is a text, but a row with images needs a conversation (a list of messages)"
        for value in images:
            open_image(value, root)
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")
    return None


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | None = SYSTEM_PROMPT,
    on_skipped: Callable[[SkippedRow], None] | None = None,
) -> tuple[Dataset | IterableDataset, list[SkippedRow]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Every image is decoded once to see whether it can be, each process looking at its share. Of a stream the rows are
    checked as they are read: the list is empty, and `on_skipped` hears of each row once.

    Args:
        dataset: rows as described at the top of this file.
        split: name of the split, for messages.
        root: folder that relative image paths start from.
        needs_solution: whether a row must have a usable `solution` or `label_idx`.
        system_prompt: put before each `problem`; rows with a `prompt` of their own keep it.
        on_skipped: called for each row of a stream that is left out; None: a warning.

    Raises:
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    if isinstance(dataset, IterableDataset):
        return _prepare_stream(dataset, split, root, needs_solution, system_prompt, on_skipped), []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    _require_columns(dataset.column_names, split, needs_solution)
    dataset = _with_image_features(dataset, root)
    examine = partial(row_problem, root=root, needs_solution=needs_solution)
    reasons = scan(_undecoded(dataset), examine, f"check rows ({split})")
    ids = dataset["id"] if "id" in dataset.column_names else range(len(dataset))
    skipped = [SkippedRow(split, row, ids[row], reason) for row, reason in enumerate(reasons) if reason is not None]
    if len(skipped) == len(dataset):
        raise DataError(
            f"None of the {len(dataset)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    return _with_prompts(dataset, system_prompt), skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path) -> None:
    """Write the rows left out to `path`, one JSON object per line, and warn with the count and the first reason."""
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_json_line(row) for row in skipped), encoding="utf-8")
    logger.warning(
        f"Left out {len(skipped)} rows that cannot be used, listed with their reasons in {path}; the first: "
        f"{skipped[0].split} row {skipped[0].row}: {skipped[0].reason}."
    )


def append_skipped(row: SkippedRow, path: Path) -> None:
    """Add a row that a stream left out to `path`, and warn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_json_line(row))
    logger.warning(f"Left out {row.split} row {row.row}, listed in {path}: {row.reason}.")


def _json_line(row: SkippedRow) -> str:
    return json.dumps(asdict(row), default=str) + "\n"


def _prompt_of(row: Mapping[str, Any], system_prompt: str | None) -> Any:
    if row.get("prompt") is not None and row["prompt"] != []:
        return _checked_prompt(row["prompt"])
    problem = row.get("problem")
    if not isinstance(problem, str) or not problem.strip():
        raise DataError("it has neither a prompt nor a problem")
    return build_prompt(problem, row.get("choices"), system_prompt=system_prompt)


def _checked_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise DataError(f"its prompt is a {type(prompt).__name__}: give a text or a conversation (a list of messages)")
    for message in prompt:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise DataError("a message of its prompt lacks a role or a content")
    if prompt[-1]["role"] == "assistant":
        raise DataError("its prompt ends with a message of the assistant, so there is nothing to answer")
    return prompt


def _require_columns(names: Iterable[str], split: str, needs_solution: bool) -> None:
    names = list(names)
    if not {"prompt", "problem"} & set(names):
        raise DataError(f"The {split} data has the columns {names}: it needs `prompt`, or `problem` with `solution`.")
    if needs_solution and not {"solution", "label_idx"} & set(names):
        raise DataError(
            f"The {split} data has the columns {names}: the accuracy reward needs `solution` (letter, index or text)."
        )


def _with_prompts(dataset: Dataset, system_prompt: str | None) -> Dataset:
    if "prompt" in dataset.column_names and all(dataset["prompt"]):
        return dataset
    if "prompt" in dataset.column_names and not isinstance(dataset.features["prompt"], List):
        raise DataError(
            "Some rows have a text as `prompt` and others only a `problem`: give all of them one or the other."
        )
    columns = [name for name in ("prompt", "problem", "choices") if name in dataset.column_names]
    prompts = [_prompt_of(row, system_prompt) for row in dataset.select_columns(columns)]
    if "prompt" in dataset.column_names:
        dataset = dataset.remove_columns("prompt")
    return dataset.add_column("prompt", prompts)


def _with_image_features(dataset: Dataset, root: Path) -> Dataset:
    """Turn columns of paths or bytes, as JSONL and other writers have them, into columns that decode on access."""
    for name in image_columns(dataset):
        feature = dataset.features[name]
        is_list = isinstance(feature, List)
        item = feature.feature if is_list else feature
        if isinstance(item, Image):
            continue
        if getattr(item, "dtype", None) == "string":
            paths = [_under(root, value) for value in dataset[name]]
            dataset = dataset.remove_columns(name).add_column(name, paths)
        try:
            dataset = dataset.cast_column(name, List(Image()) if is_list else Image())
        except (TypeError, ValueError, ArrowException) as error:
            raise DataError(f"The column `{name}` is of type {feature}: give images, paths or bytes.") from error
    return dataset


def _under(root: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_under(root, path) for path in value]
    return None if value is None else str(root / value)


def _undecoded(dataset: Any) -> Any:
    for name in image_columns(dataset):
        feature = (dataset.features or {}).get(name)
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def _prepare_stream(
    dataset: IterableDataset,
    split: str,
    root: Path,
    needs_solution: bool,
    system_prompt: str | None,
    on_skipped: Callable[[SkippedRow], None] | None,
) -> IterableDataset:
    first = next(iter(_undecoded(dataset)), None)
    if first is None:
        raise DataError(f"The {split} stream has no rows: give a data set with at least one.")
    _require_columns(first, split, needs_solution)
    heard: set[int] = set()

    def usable(row: Mapping[str, Any], index: int) -> bool:
        reason = row_problem(row, root=root, needs_solution=needs_solution)
        if reason is not None and index not in heard:
            heard.add(index)
            skipped = SkippedRow(split, index, row.get("id"), reason)
            if on_skipped is not None:
                on_skipped(skipped)
            else:
                logger.warning(f"Left out {split} row {index} of the stream: {reason}.")
        return reason is None

    def ready(row: Mapping[str, Any]) -> dict[str, Any]:
        loaded: dict[str, Any] = {"prompt": _prompt_of(row, system_prompt)}
        if row.get("images") is not None:
            loaded["images"] = [open_image(value, root) for value in row["images"]]
        elif row.get("image") is not None:
            loaded["image"] = open_image(row["image"], root)
        return {**row, **loaded}

    stream = _undecoded(dataset).filter(usable, with_indices=True).map(ready)
    if next(iter(stream), None) is None:
        raise DataError(f"None of the {len(heard)} rows of the {split} stream can be used: see the reasons above.")
    return stream
