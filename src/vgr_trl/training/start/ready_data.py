"""What a user of the trainer need not do first: find the processor, make prompts of questions, take out bad texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch import nn
from transformers.utils import logging

from vgr_trl.compat.image_processor import load_processor
from vgr_trl.data.rows.columns import IMAGE_COLUMNS, image_columns, undecoded
from vgr_trl.data.rows.regions import COLUMNS as BOX_COLUMNS
from vgr_trl.data.rows.regions import box_problem
from vgr_trl.data.rows.scan import scan
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.data.rows.streams import PLACE
from vgr_trl.data.rows.text.marks import refuse_named_files
from vgr_trl.data.rows.text.special import first_special, special_tokens
from vgr_trl.errors import DataError
from vgr_trl.rewards.signatures import reads_solution
from vgr_trl.training.constructed import ConstructedTrainer

logger = logging.get_logger(__name__)


def with_processor(model: str | Path | nn.Module, rest: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a trainer with the processor of the folder `model` where only this library can load it."""
    if len(rest) > 2 or options.get("processing_class") is not None or not isinstance(model, str | Path):
        return options
    processor = load_processor(model)
    return options if processor is None else {**options, "processing_class": processor}


def make_data_ready(trainer: ConstructedTrainer) -> None:
    """Make prompts of the rows of `trainer` that are questions still; what cannot be used is left out, with a warning.

    Raises:
        DataError: the columns are not understood, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # prompts are made elsewhere
    special = special_tokens(trainer.processing_class)
    needs_solution = any(map(reads_solution, trainer.reward_funcs))

    def ready(dataset: Any, split: str, part: str | None) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        split = split if part is None else f"{split} {part}"
        if not _has_prompts(dataset):
            prepared, skipped = prepare_rows(dataset, split=split, needs_solution=needs_solution, special=special)
            _tell(split, dataset, len(skipped), skipped[0].reason if skipped else "")
            return prepared
        return _without_special(dataset, split, lambda row: first_special(special, row["prompt"]))

    change_data(trainer, ready)


def change_data(trainer: ConstructedTrainer, change: Callable[[Any, str, str | None], Any]) -> None:
    """Replace the data of `trainer`, called `train`, and `eval` with the name of a part if it has several."""

    def changed(dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({name: change(part, split, name) for name, part in dataset.items()})
        return None if dataset is None else change(dataset, split, None)

    trainer.train_dataset = changed(trainer.train_dataset, "train")
    trainer.eval_dataset = changed(trainer.eval_dataset, "eval")


def refuse_bad_boxes(trainer: ConstructedTrainer) -> None:
    """Raise `DataError` for the first row of a data set whose boxes are none, or beyond its image; reads no stream."""

    def checked(dataset: Any, split: str, part: str | None) -> Any:
        names = dataset.column_names if isinstance(dataset, Dataset) else []
        if not set(BOX_COLUMNS) & set(names):
            return dataset
        split = split if part is None else f"{split} {part}"
        read = [name for name in names if name in (*BOX_COLUMNS, *IMAGE_COLUMNS, PLACE)]
        rows = undecoded(dataset.with_format(None).select_columns(read))
        problems = scan(rows, box_problem, f"check boxes ({split})")
        if (bad := next((row for row, problem in enumerate(problems) if problem is not None), None)) is not None:
            place = rows[bad].get(PLACE, bad)
            raise DataError(box_problem(rows[bad], f"Row {place} of the {split} data"))
        return dataset

    change_data(trainer, checked)


def refuse_files_in_prompts(prompts: list[Any]) -> None:
    """Raise `DataError` if a conversation names files or addresses, which its processor would read or fetch."""
    for prompt in prompts:
        if isinstance(prompt, list):
            try:
                refuse_named_files(prompt)
            except DataError as error:
                raise DataError(f"A row of the data cannot be used: {error}.") from None


def _has_prompts(dataset: Any) -> bool:
    """Whether the rows have prompts that TRL can read: with images, these must be conversations."""
    if "prompt" not in _names(dataset):
        return False
    first: dict[str, Any] = next(iter(dataset), {})
    return not (image_columns(dataset) and isinstance(first.get("prompt"), str))


def _names(dataset: Any) -> list[str]:
    return list(next(iter(dataset), {}) if dataset.column_names is None else dataset.column_names)


def _without_special(dataset: Any, split: str, find: Callable[[Any], str | None]) -> Any:
    """The rows whose conversations hold no special token; a text is a prompt in its final form, and may."""
    if isinstance(dataset, IterableDataset) or not dataset.column_names or len(dataset) == 0:
        return dataset
    prompts = dataset.with_format(None).select_columns(["prompt"])
    if not isinstance(prompts[0]["prompt"], list):
        return dataset
    found = scan(prompts, find, f"check texts ({split})")
    kept = [row for row, token in enumerate(found) if token is None]
    if len(kept) == len(dataset):
        return dataset
    token = next(token for token in found if token is not None)
    if not kept:
        raise DataError(f"Every row of the {split} data has a special token of the tokenizer ({token!r}): take it out.")
    _tell(
        split, None, len(dataset) - len(kept), f"its text has {token!r}, which the tokenizer reads as a special token"
    )
    return dataset.select(kept)


def _tell(split: str, dataset: Any, left_out: int, reason: str) -> None:
    if not PartialState().is_main_process:
        return
    if dataset is not None:
        logger.warning(
            f"The {split} data are questions ({', '.join(_names(dataset))}); prompts were made of them with the "
            "standard system prompt. vgr_trl.data.rows.schema.prepare_rows does so with options of your own."
        )
    if left_out:
        logger.warning(f"Left out {left_out} rows of the {split} data; the first: {reason}.")
