"""Refuse data sets that differ between processes, have images the model cannot read, or are too small."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from xxhash import xxh3_128

from vgr_trl.data.checked_rows import is_repeatable
from vgr_trl.data.images import images_of
from vgr_trl.data.lengths import SIZES
from vgr_trl.data.read_row import KEYS, image_columns, undecoded
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards.loading import check_callable
from vgr_trl.run_facts import column_names

HASHED_ROWS = 50  # whose images are compared between the processes


def refuse_differing_data(datasets: Iterable[tuple[str, Any]], num_processes: int) -> None:
    """Raise `DataError` on all processes if their data differ; the sampler would mix two prompts in a group.

    Args:
        datasets: with a name each, for the message.
    """
    if num_processes == 1:
        return
    hashes = [(name, _order_hash(data)) for name, data in datasets if is_repeatable(data)]
    first, *others = gather_object([hashes])
    for number, found in enumerate(others, start=1):
        if found != first:
            names = " and ".join(dict(set(found) ^ set(first)))
            problem = f"The {names} data of process {number} are not those of process 0, or in another order"
            raise DataError(f"{problem}: give all processes the same data set.")


def _order_hash(dataset: Dataset) -> str:
    """Hash questions and answers in their order, and the images of some rows by bytes or file name."""
    rows = undecoded(dataset.with_format(None))
    names = {*KEYS["problem"], *KEYS["solution"], SIZES} & {*rows.column_names}
    digest = xxh3_128(repr([len(rows), rows.select_columns(sorted(names))[:]]).encode())
    for place in range(0, len(rows), 1 + len(rows) // HASHED_ROWS):
        for value in images_of(rows[place]):
            content = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
            digest.update(content if isinstance(content, bytes) else os.path.basename(str(content)).encode())
    return digest.hexdigest()


def refuse_unread_images(datasets: Iterable[tuple[str, Any]], model: Any, processor: Any) -> None:
    """Raise `ConfigError` if the data of a model that reads text only have images.

    Args:
        datasets: with a name each, for the message.
        processor: of the model, or its tokenizer.
    """
    for name, dataset in datasets:
        if columns := image_columns(dataset):
            reader = f"{type(model).__name__} with {type(processor).__name__}"
            raise ConfigError(f"The {name} data has a column `{columns[0]}`, but {reader} reads text only: remove one.")


def refuse_uncallable_rewards(
    rewards: Sequence[Any], datasets: Iterable[tuple[str, Any]], measured_columns: Sequence[str]
) -> None:
    """Raise `RewardError` if a reward takes a column that neither the data nor the measurements have.

    Args:
        datasets: with a name each; streams that do not list their columns are passed over.
        measured_columns: columns that a rollout adds to the data.
    """
    for _, dataset in datasets:
        for reward in rewards if column_names(dataset) is not None else ():
            check_callable(reward, [*dataset.column_names, *measured_columns])


def refuse_few_rows(dataset: Any, prompts: int) -> None:
    """Raise `DataError` if the train data have fewer rows than a rollout takes prompts.

    TRL drops the incomplete rollout at the end of an epoch, here all rows.
    """
    if hasattr(dataset, "__len__") and (rows := len(dataset)) < prompts:
        problem = f"The train data has {rows} rows, but a rollout takes {prompts} prompts"
        raise DataError(f"{problem}: add rows, or lower per_device_train_batch_size or gradient_accumulation_steps.")
