"""Prepare a constructed trainer: name rewards apart, make prompts of questions, drop unusable rows, refuse bad data."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, cast

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, Features, IterableDataset, Value
from peft import PeftConfig
from transformers.utils import logging
from trl import GRPOTrainer
from xxhash import xxh3_128

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import (
    PREPARED_STREAMS,
    REASON,
    SkippedRow,
    is_repeatable,
    map_rows,
    prepare_rows,
    prepared_transform,
    skipped_rows,
)
from vgr_trl.data.images import BOX_COLUMNS, IMAGE_COLUMNS, MEDIA, PLACE, boxes_of, images_of
from vgr_trl.data.prompts import (
    SIZES,
    image_sizes_of,
    refuse_special_tokens,
    require_ending_template,
    special_tokens,
)
from vgr_trl.data.read_row import KEYS, column_names, image_columns, reason_of, require_columns, undecoded
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.patches.transformers import close_group_at_exit, disable_cudnn_attention, give_timeout
from vgr_trl.patches.trl import let_decoding_compile, suppress_image_tokens
from vgr_trl.registries import BLIND_ANSWERS, find_measurements, needed_signals
from vgr_trl.rewards.calling import check_callable, reads_solution
from vgr_trl.run import iterate_datasets
from vgr_trl.validate.options import (
    check_head,
    refuse_differing_options,
    refuse_targets_without_module,
    refuse_unfit_model,
)

logger = logging.get_logger(__name__)


def prepare_trainer(trainer: GRPOTrainer, peft_config: PeftConfig | None, options: Mapping[str, Any]) -> None:
    """Check a constructed trainer, name its rewards apart, and make prompts of its data.

    Args:
        trainer: constructed.
        peft_config: adapters that it was given.
        options: arguments of `apply_chat_template` with which TRL writes prompts.

    Raises:
        UnsupportedTRLError: TRL's fused head does not support this device.
        ConfigError: options differ between the processes, the adapter names modules that the model lacks, nothing of
            the model is trained, its tokenizer pads on the right, or the data have images that it cannot read.
        DataError: the columns have no known names, or no row can be used.
    """
    args: Any = trainer.args
    model, processor, processes = trainer.model, trainer.processing_class, trainer.accelerator.num_processes
    close_group_at_exit()
    refuse_differing_options(args)
    give_timeout(args.ddp_timeout)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    if not trainer.use_vllm:
        let_decoding_compile(args, trainer.generation_config, trainer.accelerator)
    if not args.cudnn_attention and (notice := disable_cudnn_attention()):
        _warn(notice)
    if peft_config is not None:
        refuse_targets_without_module(cast("Any", model))
    refuse_unfit_model(model, processor)
    trainer.reward_func_names = number_rewards(trainer.reward_func_names)
    require_ending_template(processor, options)
    refuse_differing_data(iterate_datasets(trainer.train_dataset, trainer.eval_dataset), processes)
    if trainer.environment_factories is None and trainer.rollout_func is None:  # these make the prompts
        change = prepare_data(args, trainer.reward_funcs, processor, trainer._is_vlm)
        trainer.train_dataset, trainer.eval_dataset = change_data(trainer.train_dataset, trainer.eval_dataset, change)
    datasets = [*iterate_datasets(trainer.train_dataset, trainer.eval_dataset)]
    refuse_differing_data(datasets, processes)  # a file may be missing on one machine
    if not trainer._is_vlm:
        refuse_unread_images(datasets, model, processor)


def number_rewards(names: Iterable[str]) -> list[str]:
    """Return unique names of rewards; a repeated name gets a number: `name`, `name_2`, …"""
    unique: list[str] = []
    for name in names:
        number, unique_name = 1, name
        while unique_name in unique:
            number, unique_name = number + 1, f"{name}_{number + 1}"
        if unique_name != name:
            _warn(f"Two rewards are named {name}: the metrics of one of them are named {unique_name}.")
        unique.append(unique_name)
    return unique


def prepare_data(args: DAPOConfig, rewards: Sequence[Any], processor: Any, is_vlm: bool) -> Callable[[Any, str], Any]:
    """Return the function that makes prompts of rows that are questions; it drops unusable rows, with a warning.

    It raises `DataError` if columns have no known names, or no row can be used.

    Args:
        args: options of the run.
        rewards: reward functions.
        processor: processor of the model, or its tokenizer.
        is_vlm: whether the model reads images.
    """
    special = special_tokens(processor)
    needs_solution = any(map(reads_solution, rewards))
    boxes, context = reads_boxes(args, rewards), read_context(args)

    def ready(dataset: Any, split: str) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset) or dataset in PREPARED_STREAMS:
            return dataset
        if isinstance(dataset, Dataset) and (prepared_transform(dataset) or not is_repeatable(dataset)):
            return _drop_bad_rows(dataset, split, special, boxes, context)
        rows = undecoded(dataset.with_format(None))
        first: dict[str, Any] = next(iter(rows), {})
        in_final_form = isinstance(first.get("prompt"), str if is_vlm else str | list)
        if in_final_form and {*MEDIA}.isdisjoint(first):
            require_columns(rows, split, needs_solution=False)
            return _drop_bad_rows(dataset, split, special, boxes, context) if isinstance(dataset, Dataset) else dataset
        rules: dict[str, Any] = {"needs_solution": needs_solution, "special": special}
        ready_rows, skipped = prepare_rows(rows, split=split, boxes=boxes, context=context, **rules)
        if not isinstance(first.get("prompt"), list):
            _warn(f"The {split} data have questions; vgr_trl.data.checked_rows.prepare_rows turned them into prompts.")
        _warn_of_skipped(split, skipped)
        return ready_rows

    return ready


def change_data(train: Any, evaluation: Any, change: Callable[[Any, str], Any]) -> tuple[Any, Any]:
    """Return the train data and every part of the eval data, changed.

    Args:
        train: train data.
        evaluation: eval data, by name if there are several; None: there are none.
        change: takes a dataset and its name: `train`, `eval`, or `eval` with the name of the part.
    """
    train = change(train, "train")
    if isinstance(evaluation, dict):
        parts = {name: change(part, f"eval {name}") for name, part in evaluation.items()}
        return train, type(evaluation)(parts)
    return train, None if evaluation is None else change(evaluation, "eval")


def reads_boxes(args: DAPOConfig, rewards: Iterable[Any]) -> bool:
    """Whether a signal, a credit rule, a reward or a view reads the boxes of rows."""
    needs = {need for reward in rewards for need in needed_signals(reward)} - {BLIND_ANSWERS}
    return "crop_to_box" in args.row_views.values() or "regions" in {*args.readers(), *find_measurements(needs)}


def read_context(args: DAPOConfig) -> str:
    """Return the name of the column with a text that a teacher reads, or an empty text if none does."""
    return "".join({"privileged_context"} & {*args.row_views.values()})


def _drop_bad_rows(dataset: Dataset, split: str, special: re.Pattern[str] | None, boxes: bool, context: str) -> Dataset:
    """Drop rows whose conversation holds a special token, or whose boxes or texts for a teacher cannot be read.

    A text is a prompt in its final form, and may hold special tokens.

    Args:
        dataset: rows with prompts.
        split: name for messages.
        special: matches the special tokens of the model.
        boxes: whether the boxes are read.
        context: column with a text for a teacher; "": no teacher reads one.
    """
    shown = prepared_transform(dataset)
    rules = shown and shown.rules
    if rules and rules.special == special and rules.boxes >= boxes and rules.context >= context:
        return dataset  # `prepare_rows` has checked it
    names = set(dataset.column_names or ())
    boxes = boxes and bool(names & set(BOX_COLUMNS))
    read = names & {"prompt", PLACE, context, *((*BOX_COLUMNS, *IMAGE_COLUMNS, SIZES) if boxes else ())}
    rows = undecoded(dataset.with_format(None).select_columns(sorted(read)))
    texts = len(rows) > 0 and not isinstance(rows[0]["prompt"], list)
    if len(rows) == 0 or (texts and not boxes and context not in names):
        return dataset

    def examine(row: Mapping[str, Any]) -> dict[str, str | None]:
        sizes = image_sizes_of(row) if boxes else []
        try:
            refuse_special_tokens(special, [] if texts else row["prompt"], row.get(context))
            if len(sizes) == 1:
                boxes_of(row, sizes[0], "it")
        except DataError as error:
            return {REASON: reason_of(error)}
        return {REASON: None}

    features, title = Features({REASON: Value("string")}), f"Checking prompts ({split})"
    reasons = list(map_rows(rows, examine, features, [special, boxes, context], title)[REASON])
    skipped = skipped_rows(split, reasons, places=rows[PLACE] if PLACE in read else None)
    _warn_of_skipped(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _warn_of_skipped(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped:
        first = skipped[0]
        _warn(f"Skipped {len(skipped)} rows of the {split} data; the first: row {first.row}: {first.reason}.")


def _warn(sentence: str) -> None:
    if PartialState().is_main_process:
        logger.warning(sentence)


def check_rewards(rewards: Sequence[Any], datasets: Iterable[Any], measured_columns: Sequence[str]) -> None:
    """Raise `RewardError` if a reward takes a column that neither the data nor a rollout has.

    Args:
        rewards: reward functions.
        datasets: train and eval data.
        measured_columns: columns that a rollout adds to the data.
    """
    for dataset in datasets:
        for reward in rewards if column_names(dataset) is not None else ():
            check_callable(reward, [*dataset.column_names, *measured_columns])


def refuse_few_rows(data: Any, prompts: int) -> None:
    """Raise `DataError` if the train data have fewer rows than a rollout takes prompts."""
    if isinstance(data, Sized) and len(data) < prompts:  # TRL drops the incomplete rollout at the end, here all rows
        problem = f"The train data has {len(data)} rows, but a rollout takes {prompts} prompts"
        raise DataError(f"{problem}: add rows, or lower per_device_train_batch_size or gradient_accumulation_steps.")


HASHED_ROWS = 50  # rows whose images are compared between the processes


def refuse_differing_data(datasets: Iterable[tuple[str, Any]], num_processes: int) -> None:
    """Raise `DataError` on all processes if their data differ; the sampler would mix two prompts in a group.

    Args:
        datasets: data sets, each with a name for the message.
    """
    if num_processes == 1:
        return
    hashes = [(name, _order_hash(data)) for name, data in datasets if is_repeatable(data)]
    first, *other_hashes = gather_object([hashes])
    for number, process_hashes in enumerate(other_hashes, start=1):
        if process_hashes != first:
            names = " and ".join(dict(set(process_hashes) ^ set(first)))
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
    """Raise `ConfigError` if the data have images but the model reads text only.

    Args:
        datasets: data sets, each with a name for the message.
        processor: processor of the model, or its tokenizer.
    """
    for name, dataset in datasets:
        if columns := image_columns(dataset):
            reader = f"{type(model).__name__} with {type(processor).__name__}"
            raise ConfigError(f"The {name} data has a column `{columns[0]}`, but {reader} reads text only: remove one.")
