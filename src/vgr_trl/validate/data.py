"""Prepare the data of a trainer: prompts from questions, rows that cannot be used left out."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, Features, IterableDataset, Value
from peft import PeftConfig
from transformers.utils import logging
from xxhash import xxh3_128

from vgr_trl.boxes import BOX_COLUMNS, refuse_bad_boxes
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import (
    PREPARED_STREAMS,
    REASON,
    SkippedRow,
    drop_long_prompts,
    is_repeatable,
    prepare_rows,
    prepared_transform,
    skipped_rows,
)
from vgr_trl.data.images import IMAGE_COLUMNS, MEDIA, PLACE, images_of
from vgr_trl.data.lengths import SIZES, PromptLengths, image_sizes_of, require_ending_template
from vgr_trl.data.map_rows import map_rows
from vgr_trl.data.prompts import refuse_special_tokens, special_tokens
from vgr_trl.data.read_row import KEYS, image_columns, reason_of, require_columns, undecoded
from vgr_trl.patches.transformers import close_group_at_exit, disable_cudnn_attention, give_timeout
from vgr_trl.patches.trl import let_decoding_compile, suppress_image_tokens
from vgr_trl.registries import BLIND_ANSWERS, find_measurements, needed_signals
from vgr_trl.rewards.loading import check_callable, reads_solution
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.utils import ConfigError, DataError
from vgr_trl.validate.features import iterate_datasets
from vgr_trl.validate.options import (
    check_head,
    refuse_differing_options,
    refuse_targets_without_module,
    refuse_unfit_model,
)

# The data

HASHED_ROWS = 50  # whose images are compared between the processes

logger = logging.get_logger(__name__)


def prepare_trainer(trainer: ConstructedTrainer, peft_config: PeftConfig | None) -> None:
    """Check what TRL has constructed, and make prompts of its data.

    Raises:
        UnsupportedTRLError: TRL's fused head does not support this device.
        ConfigError: options differ between the processes, the adapter names modules that the model lacks, nothing of
            the model is trained, its tokenizer pads on the right, or the data have images that it cannot read.
        DataError: the data are not understood, or no row can be used.
    """
    close_group_at_exit()
    refuse_differing_options(trainer.args)
    give_timeout(trainer.args.ddp_timeout)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    let_decoding_compile(trainer)
    notice = None if trainer.args.cudnn_attention else disable_cudnn_attention()
    if notice and trainer.accelerator.is_main_process:
        logger.warning(notice)
    if peft_config is not None:
        refuse_targets_without_module(trainer.accelerator.unwrap_model(trainer.model))
    refuse_unfit_model(trainer)
    number_rewards(trainer)
    require_ending_template(trainer.processing_class, template_options(trainer))
    refuse_differing_data(trainer)
    prepare_data(trainer)
    refuse_differing_data(trainer)  # a file may be missing on one machine
    for name, dataset in iterate_datasets(trainer):
        if not trainer._is_vlm and (columns := image_columns(dataset)):
            reader = f"{type(trainer.model).__name__} with {type(trainer.processing_class).__name__}"
            raise ConfigError(f"The {name} data has a column `{columns[0]}`, but {reader} reads text only: remove one.")


def number_rewards(trainer: ConstructedTrainer) -> None:
    """Give rewards that share a name metrics of their own: `name`, `name_2`, …"""
    names: list[str] = []
    for name in trainer.reward_func_names:
        number, own = 1, name
        while own in names:
            number, own = number + 1, f"{name}_{number + 1}"
        if own != name:
            _warn(f"Two rewards are named {name}: the metrics of one of them are named {own}.")
        names.append(own)
    trainer.reward_func_names = names


def template_options(trainer: ConstructedTrainer) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` with which TRL writes prompts."""
    options: dict[str, Any] = {"tools": trainer.tools or None, "chat_template": trainer.chat_template}
    return options | cast("dict[str, Any]", trainer.chat_template_kwargs)


def refuse_differing_data(trainer: ConstructedTrainer) -> None:
    """Raise `DataError` on all processes if their data differ, whose sampler would put two prompts into one group."""
    if trainer.accelerator.num_processes == 1:
        return
    hashes = [(name, _order_hash(data)) for name, data in iterate_datasets(trainer) if is_repeatable(data)]
    first, *others = gather_object([hashes])
    for number, found in enumerate(others, start=1):
        if found != first:
            names = " and ".join(dict(set(found) ^ set(first)))
            problem = f"The {names} data of process {number} are not those of process 0, or in another order"
            raise DataError(f"{problem}: give all processes the same data set.")


def _order_hash(dataset: Dataset) -> str:
    """Hash questions and answers in their order, and the images of some rows by their bytes, or by names of files."""
    rows = undecoded(dataset.with_format(None))
    names = {*KEYS["problem"], *KEYS["solution"], SIZES} & {*rows.column_names}
    digest = xxh3_128(repr([len(rows), rows.select_columns(sorted(names))[:]]).encode())
    for place in range(0, len(rows), 1 + len(rows) // HASHED_ROWS):
        for value in images_of(rows[place]):
            content = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
            digest.update(content if isinstance(content, bytes) else os.path.basename(str(content)).encode())
    return digest.hexdigest()


def prepare_data(trainer: ConstructedTrainer) -> None:
    """Make prompts of rows that are questions; leave out rows that cannot be used, with a warning.

    Raises:
        DataError: the columns are not understood, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # which make the prompts
    special = special_tokens(trainer.processing_class)
    needs_solution = any(map(reads_solution, trainer.reward_funcs))
    boxes = reads_boxes(trainer.args, trainer.reward_funcs)

    def ready(dataset: Any, split: str, part: str | None) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset) or dataset in PREPARED_STREAMS:
            return dataset
        split = split if part is None else f"{split} {part}"
        if isinstance(dataset, Dataset) and (prepared_transform(dataset) or not is_repeatable(dataset)):
            return _drop_bad_rows(dataset, split, special, boxes)
        rows = undecoded(dataset.with_format(None))
        first: dict[str, Any] = next(iter(rows), {})
        in_final_form = isinstance(first.get("prompt"), str if trainer._is_vlm else str | list)
        if in_final_form and {*MEDIA}.isdisjoint(first):
            require_columns(rows, split, needs_solution=False)
            return _drop_bad_rows(dataset, split, special, boxes) if isinstance(dataset, Dataset) else dataset
        rules: dict[str, Any] = {"needs_solution": needs_solution, "special": special, "boxes": boxes}
        ready_rows, skipped = prepare_rows(rows, split=split, **rules)
        if not isinstance(first.get("prompt"), list):
            _warn(f"The {split} data have questions; vgr_trl.data.checked_rows.prepare_rows turned them into prompts.")
        _warn_left_out(split, skipped)
        return ready_rows

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
    needs = {need for reward in rewards for need in needed_signals(reward)} - {BLIND_ANSWERS}
    return "regions" in {*args.readers(), *find_measurements(needs)}


def _drop_bad_rows(dataset: Dataset, split: str, special: re.Pattern[str] | None, boxes: bool) -> Dataset:
    """The rows, with prompts, whose conversations hold no special token, and whose boxes can be read.

    A text is a prompt in its final form, and may hold special tokens.
    """
    if (shown := prepared_transform(dataset)) and shown.rules.special == special and shown.rules.boxes >= boxes:
        return dataset  # `prepare_rows` has checked it
    names = set(dataset.column_names or ())
    boxes = boxes and bool(names & set(BOX_COLUMNS))
    read = names & {"prompt", PLACE, *((*BOX_COLUMNS, *IMAGE_COLUMNS, SIZES) if boxes else ())}
    rows = undecoded(dataset.with_format(None).select_columns(sorted(read)))
    texts = len(rows) > 0 and not isinstance(rows[0]["prompt"], list)
    if len(rows) == 0 or (texts and not boxes):
        return dataset

    def examine(row: Mapping[str, Any]) -> dict[str, str | None]:
        sizes = image_sizes_of(row) if boxes else []
        try:
            if not texts:
                refuse_special_tokens(special, row["prompt"])
            refuse_bad_boxes(row, sizes)
        except DataError as error:
            return {REASON: reason_of(error)}
        return {REASON: None}

    features, title = Features({REASON: Value("string")}), f"Checking prompts ({split})"
    reasons = list(map_rows(rows, examine, features, [special, boxes], title)[REASON])
    skipped = skipped_rows(split, reasons, places=rows[PLACE] if PLACE in read else None)
    _warn_left_out(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _warn_left_out(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped:
        first = skipped[0]
        _warn(f"Skipped {len(skipped)} rows of the {split} data; the first: row {first.row}: {first.reason}.")


def _warn(sentence: str) -> None:
    if PartialState().is_main_process:
        logger.warning(sentence)


def check_data(trainer: ConstructedTrainer, measured_columns: Iterable[str]) -> None:
    """Refuse rewards and data that cannot be trained with; leave out prompts over `max_prompt_length`.

    Environments add columns of their own later.
    """
    args = trainer.args
    if trainer.environment_factories is None and trainer.rollout_func is None:
        for _, dataset in iterate_datasets(trainer):
            for reward in trainer.reward_funcs if getattr(dataset, "column_names", None) is not None else ():
                check_callable(reward, [*dataset.column_names, *measured_columns])
    if (limit := args.max_prompt_length) is not None:

        def count_dropped(split: str) -> None:
            trainer.step_metrics.prompts_too_long += split == "train"

        lengths = PromptLengths(trainer.processing_class, **template_options(trainer))

        def kept(dataset: Any, split: str, part: str | None) -> Any:
            return drop_long_prompts(dataset, lengths, limit, part or split, partial(count_dropped, split))

        change_data(trainer, kept)
    prompts, train_dataset = args.prompts_per_rollout, trainer.train_dataset
    if hasattr(train_dataset, "__len__") and (rows := len(train_dataset)) < prompts:
        # TRL drops the incomplete rollout at the end of an epoch, here everything.
        problem = f"The train data has {rows} rows, but a rollout takes {prompts} prompts"
        raise DataError(f"{problem}: add rows, or lower per_device_train_batch_size or gradient_accumulation_steps.")
