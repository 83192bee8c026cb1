"""What a user of the trainer need not do first: make prompts of questions, take out bad texts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from vgr_trl.config import DAPOConfig
from vgr_trl.data.rows.columns import IMAGE_COLUMNS, PLACE, image_columns, undecoded
from vgr_trl.data.rows.regions import COLUMNS as BOX_COLUMNS
from vgr_trl.data.rows.regions import box_problem
from vgr_trl.data.rows.repeated import fitted_by
from vgr_trl.data.rows.scan import scan
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.data.rows.skipped import SkippedRow, skipped_rows
from vgr_trl.data.rows.streams import Sieve
from vgr_trl.data.rows.text.marks import refuse_named_files
from vgr_trl.data.rows.text.special import special_problem, special_tokens
from vgr_trl.errors import DataError
from vgr_trl.registries import BLIND_ANSWERS, measurements, needs_of
from vgr_trl.rewards.signatures import reads_solution
from vgr_trl.training.constructed import ConstructedTrainer

logger = logging.get_logger(__name__)


def make_data_ready(trainer: ConstructedTrainer) -> None:
    """Make prompts of the rows of `trainer` that are questions still; what cannot be used is left out, with a warning.

    Raises:
        DataError: the columns are not understood, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # prompts are made elsewhere
    special = special_tokens(trainer.processing_class)
    needs_solution = any(map(reads_solution, trainer.reward_funcs))
    boxes = reads_boxes(trainer.args, trainer.reward_funcs)

    def ready(dataset: Any, split: str, part: str | None) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        split = split if part is None else f"{split} {part}"
        if not _has_prompts(dataset):
            prepared, skipped = prepare_rows(
                dataset, split=split, needs_solution=needs_solution, special=special, boxes=boxes
            )
            _tell_made(split, dataset)
            _tell_left_out(split, skipped)
            return prepared
        if isinstance(dataset, IterableDataset):
            return _stream_without_bad_boxes(dataset, split) if boxes else dataset
        return _without_bad_rows(dataset, split, special, boxes)

    change_data(trainer, ready)


def change_data(trainer: ConstructedTrainer, change: Callable[[Any, str, str | None], Any]) -> None:
    """Replace the data of `trainer`, called `train`, and `eval` with the name of a part if it has several."""

    def changed(dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({name: change(part, split, name) for name, part in dataset.items()})
        return None if dataset is None else change(dataset, split, None)

    trainer.train_dataset = changed(trainer.train_dataset, "train")
    trainer.eval_dataset = changed(trainer.eval_dataset, "eval")


def reads_boxes(args: DAPOConfig, rewards: Iterable[Any]) -> bool:
    """Return whether a signal, a rule of credit or one of the rewards reads the boxes of rows."""
    needs = {need for reward in rewards for need in needs_of(reward)} - {BLIND_ANSWERS}
    return "regions" in {*args.readers(), *measurements(needs)}


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


def _without_bad_rows(dataset: Dataset, split: str, special: re.Pattern[str] | None, boxes: bool) -> Dataset:
    """The rows, with prompts, whose conversations hold no special token, and whose boxes can be read.

    A text is a prompt in its final form, and may hold special tokens.
    """
    names = set(dataset.column_names or ())
    boxes = boxes and bool(names & set(BOX_COLUMNS))
    read = names & {"prompt", PLACE, *(BOX_COLUMNS + IMAGE_COLUMNS if boxes else ())}
    rows = undecoded(dataset.with_format(None).select_columns(sorted(read)))
    texts = len(rows) > 0 and not isinstance(rows[0]["prompt"], list)
    if len(rows) == 0 or (texts and not boxes):
        return dataset
    fitted = fitted_by(dataset)

    def problem(row: Mapping[str, Any]) -> str | None:
        found = None if texts else special_problem(special, row["prompt"])
        return box_problem(row, fitted) if found is None and boxes else found

    reasons = scan(rows, problem, f"check prompts ({split})")
    skipped = skipped_rows(split, reasons, places=rows[PLACE] if PLACE in read else None)
    _tell_left_out(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _stream_without_bad_boxes(dataset: IterableDataset, split: str) -> IterableDataset:
    sieve = Sieve(split, box_problem)
    kept = dataset.filter(sieve.keeps, with_indices=True)
    sieve.require_row(kept)
    return kept


def _tell_left_out(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped and PartialState().is_main_process:
        logger.warning(
            f"Left out {len(skipped)} rows of the {split} data; the first: row {skipped[0].row}: {skipped[0].reason}."
        )


def _tell_made(split: str, dataset: Any) -> None:
    if PartialState().is_main_process:
        logger.warning(
            f"The {split} data are questions ({', '.join(_names(dataset))}); prompts were made of them with the "
            "standard system prompt. vgr_trl.data.rows.schema.prepare_rows does so with options of your own."
        )
