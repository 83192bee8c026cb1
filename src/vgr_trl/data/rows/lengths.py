"""Rows whose prompt is too long are left out, never truncated: truncation would cut image tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from vgr_trl.data.rows.scan import scan
from vgr_trl.errors import DataError

logger = logging.get_logger(__name__)


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    length_of: Callable[[Mapping[str, Any]], int],
    limit: int,
    name: str = "train",
    on_dropped: Callable[[], None] = lambda: None,
) -> Dataset | IterableDataset:
    """Return `dataset` without the rows whose prompt has more than `limit` tokens.

    A `Dataset` is measured once, at the start, and what was left out is logged; a stream is measured as it is read.

    Args:
        length_of: tokens of a row's prompt, image tokens included.
        limit: `max_prompt_length`, in tokens.
        on_dropped: called for each row that a stream leaves out.

    Raises:
        DataError: no row is within the limit.
    """
    if isinstance(dataset, IterableDataset):

        def keep(row: Mapping[str, Any]) -> bool:
            fits = length_of(row) <= limit
            if not fits:
                on_dropped()
            return fits

        return dataset.filter(keep)

    lengths = scan(dataset, length_of, f"prompt lengths ({name})")
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    if not kept:
        raise DataError(
            f"Every one of the {len(dataset)} rows of the {name} data has more than max_prompt_length={limit} tokens "
            f"(the shortest prompt has {min(lengths, default=0)}): raise max_prompt_length or use smaller images."
        )
    if len(kept) == len(dataset):
        return dataset
    if PartialState().is_main_process:
        logger.warning(
            f"max_prompt_length={limit}: left out {len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data "
            f"(the longest prompt has {max(lengths)} tokens)."
        )
    return dataset.select(kept)
