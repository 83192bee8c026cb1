"""Prepare a constructed trainer: name rewards apart, make prompts of questions, drop unusable rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, Value
from peft import PeftConfig
from transformers.utils import logging

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
from vgr_trl.data.images import IMAGE_COLUMNS, MEDIA, PLACE
from vgr_trl.data.lengths import SIZES, PromptLengths, image_sizes_of, require_ending_template
from vgr_trl.data.map_rows import map_rows
from vgr_trl.data.prompts import refuse_special_tokens, special_tokens
from vgr_trl.data.read_row import reason_of, require_columns, undecoded
from vgr_trl.errors import DataError
from vgr_trl.patches.transformers import close_group_at_exit, disable_cudnn_attention, give_timeout
from vgr_trl.patches.trl import let_decoding_compile, suppress_image_tokens
from vgr_trl.registries import BLIND_ANSWERS, find_measurements, needed_signals
from vgr_trl.rewards.loading import reads_solution
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.run_facts import iterate_datasets
from vgr_trl.validate.data import (
    refuse_differing_data,
    refuse_few_rows,
    refuse_uncallable_rewards,
    refuse_unread_images,
)
from vgr_trl.validate.options import (
    check_head,
    refuse_differing_options,
    refuse_targets_without_module,
    refuse_unfit_model,
)

logger = logging.get_logger(__name__)


def prepare_trainer(trainer: ConstructedTrainer, peft_config: PeftConfig | None) -> None:
    """Check a constructed trainer, name its rewards apart, and make prompts of its data.

    Raises:
        UnsupportedTRLError: TRL's fused head does not support this device.
        ConfigError: options differ between the processes, the adapter names modules that the model lacks, nothing of
            the model is trained, its tokenizer pads on the right, or the data have images that it cannot read.
        DataError: the columns have no known names, or no row can be used.
    """
    model, processor, processes = trainer.model, trainer.processing_class, trainer.accelerator.num_processes
    close_group_at_exit()
    refuse_differing_options(trainer.args)
    give_timeout(trainer.args.ddp_timeout)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    let_decoding_compile(trainer)
    if not trainer.args.cudnn_attention and (notice := disable_cudnn_attention()):
        _warn(notice)
    if peft_config is not None:
        refuse_targets_without_module(cast("Any", model))
    refuse_unfit_model(model, processor)
    trainer.reward_func_names = number_rewards(trainer.reward_func_names)
    require_ending_template(processor, template_options(trainer))
    refuse_differing_data(iterate_datasets(trainer.train_dataset, trainer.eval_dataset), processes)
    prepare_data(trainer)
    datasets = [*iterate_datasets(trainer.train_dataset, trainer.eval_dataset)]
    refuse_differing_data(datasets, processes)  # a file may be missing on one machine
    if not trainer._is_vlm:
        refuse_unread_images(datasets, model, processor)


def number_rewards(names: Iterable[str]) -> list[str]:
    """Return unique names of rewards; a repeated name gets a number: `name`, `name_2`, …"""
    unique: list[str] = []
    for name in names:
        number, own = 1, name
        while own in unique:
            number, own = number + 1, f"{name}_{number + 1}"
        if own != name:
            _warn(f"Two rewards are named {name}: the metrics of one of them are named {own}.")
        unique.append(own)
    return unique


def template_options(trainer: ConstructedTrainer) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` with which TRL writes prompts."""
    options: dict[str, Any] = {"tools": trainer.tools or None, "chat_template": trainer.chat_template}
    return options | cast("dict[str, Any]", trainer.chat_template_kwargs)


def prepare_data(trainer: ConstructedTrainer) -> None:
    """Make prompts of rows that are questions; drop rows that cannot be used, with a warning.

    Raises:
        DataError: the columns have no known names, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # these make the prompts
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
        _warn_of_skipped(split, skipped)
        return ready_rows

    change_data(trainer, ready)


def change_data(trainer: ConstructedTrainer, change: Callable[[Any, str, str | None], Any]) -> None:
    """Replace the train data and every part of the eval data of a trainer.

    Args:
        change: takes a dataset, `train` or `eval`, and the name of the part if there are several.
    """

    def changed(dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({name: change(part, split, name) for name, part in dataset.items()})
        return None if dataset is None else change(dataset, split, None)

    trainer.train_dataset = changed(trainer.train_dataset, "train")
    trainer.eval_dataset = changed(trainer.eval_dataset, "eval")


def reads_boxes(args: DAPOConfig, rewards: Iterable[Any]) -> bool:
    """Whether a signal, a credit rule or a reward reads the boxes of rows."""
    needs = {need for reward in rewards for need in needed_signals(reward)} - {BLIND_ANSWERS}
    return "regions" in {*args.readers(), *find_measurements(needs)}


def _drop_bad_rows(dataset: Dataset, split: str, special: re.Pattern[str] | None, boxes: bool) -> Dataset:
    """Drop rows whose conversation holds a special token, or whose boxes cannot be read.

    A text is a prompt in its final form, and may hold special tokens.

    Args:
        dataset: rows with prompts.
        split: name for messages.
        special: matches the special tokens of the model.
        boxes: whether the boxes are read.
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
    _warn_of_skipped(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _warn_of_skipped(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped:
        first = skipped[0]
        _warn(f"Skipped {len(skipped)} rows of the {split} data; the first: row {first.row}: {first.reason}.")


def _warn(sentence: str) -> None:
    if PartialState().is_main_process:
        logger.warning(sentence)


def check_data(trainer: ConstructedTrainer, measured_columns: Sequence[str]) -> None:
    """Refuse rewards and data that cannot be trained with; drop prompts over `max_prompt_length`.

    Args:
        measured_columns: columns that a rollout adds to the data; environments add theirs later.
    """
    if trainer.environment_factories is None and trainer.rollout_func is None:
        datasets = iterate_datasets(trainer.train_dataset, trainer.eval_dataset)
        refuse_uncallable_rewards(trainer.reward_funcs, datasets, measured_columns)
    if (limit := trainer.args.max_prompt_length) is not None:

        def count_dropped(split: str) -> None:
            trainer.step_metrics.prompts_too_long += split == "train"

        lengths = PromptLengths(trainer.processing_class, **template_options(trainer))

        def drop_long(dataset: Any, split: str, part: str | None) -> Any:
            return drop_long_prompts(dataset, lengths, limit, part or split, partial(count_dropped, split))

        change_data(trainer, drop_long)
    refuse_few_rows(trainer.train_dataset, trainer.args.prompts_per_rollout)
