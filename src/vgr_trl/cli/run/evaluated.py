"""What a run evaluates on: the split for it, rows held out where there is none, or nothing, and why."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.trainer_utils import IntervalStrategy

from vgr_trl.cli.flags.arguments import DataArguments
from vgr_trl.cli.flags.argv import config_values, flags_in
from vgr_trl.cli.flags.recipe import recipe_options
from vgr_trl.cli.loading import image_root
from vgr_trl.config import DAPOConfig
from vgr_trl.data.held_out import hold_out
from vgr_trl.data.read.data_files import parse_data_files
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.errors import DataError, MissingSplitError

logger = logging.getLogger(__name__)

Load = Callable[[], tuple[Any, list[SkippedRow]]]


@dataclass
class Evaluated:
    """Rows to train and to evaluate on, those left out of the latter, and what the start says about it."""

    train: Any
    test: Any = None
    skipped: list[SkippedRow] = field(default_factory=list)
    said: str | None = None


def is_stated(name: str, argv: Sequence[str] | None) -> bool:
    """Return whether an option is given by a flag, in the file of `--config`, or by a recipe."""
    arguments = sys.argv[1:] if argv is None else argv
    return name in dict(flags_in(arguments)) | config_values(arguments) | recipe_options(arguments)


def rows_to_evaluate(data: DataArguments, config: DAPOConfig, train: Any, load: Load, follows: bool) -> Evaluated:
    """Return what is evaluated on, and let `eval_strategy` follow where the user has left it open.

    Args:
        config: the options of the run; `eval_strategy` is changed.
        load: gives the rows of the split to evaluate on.
        follows: whether `eval_strategy` was not stated, so that it is on where a hub data set or a folder has rows for
            it.

    Raises:
        DataError: evaluation is asked for, and there are no rows for it.
    """
    asked = config.eval_strategy != "no"
    split = data.dataset_test_split
    has_own = data.test_dataset is not None
    if not asked and not has_own and data.data_files and split in parse_data_files(data.data_files):
        because = "because eval_strategy is no: add --eval_strategy steps."
        return Evaluated(train, said=f"{split}= is given, but nothing is evaluated, {because}")
    if not asked and (not follows or (data.data_files and not has_own) or data.dataset_streaming):
        return Evaluated(train)
    if not asked and (why := _why_not(config)) is not None:
        return Evaluated(train, said=f"Nothing is evaluated, because {why}")
    try:
        found = _loaded(data, config, train, load)
    except DataError as error:
        if asked:
            raise
        return Evaluated(train, said=f"Nothing is evaluated: {error}")
    if not asked:
        config.eval_strategy, config.do_eval = IntervalStrategy.EPOCH, True
        known = found.said or f"The data have the split {split}."
        found.said = f"{known} It is evaluated every epoch (not with --eval_strategy no)."
    return found


def _loaded(data: DataArguments, config: DAPOConfig, train: Any, load: Load) -> Evaluated:
    try:
        return Evaluated(train, *load())
    except MissingSplitError as error:
        if data.test_dataset is not None:
            raise
        if data.dataset_streaming:
            raise DataError(f"{error} A stream cannot be split: name one, or drop --eval_strategy.") from error
    kept, test = hold_out(train, config.seed, image_root(data, data.dataset_train_split))
    said = (
        f"The data have no split {data.dataset_test_split}: {len(test)} of {len(train)} rows are held out of training "
        f"for it, by image and seed {config.seed}."
    )
    return Evaluated(kept, test.select(range(min(len(test), data.max_test_rows or len(test)))), said=said)


def _why_not(config: DAPOConfig) -> str | None:
    """What TRL refuses where evaluation is asked for."""
    size = config.per_device_eval_batch_size * config.world_size
    generations = config.num_generations_eval or config.num_generations or 1
    if size % generations == 0:
        return None
    return (
        f"a batch of {size} completions (per_device_eval_batch_size) is no multiple of {generations} completions per "
        "prompt (eval_num_generations): change one of the two."
    )
