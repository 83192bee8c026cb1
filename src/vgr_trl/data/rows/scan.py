"""Looking at every row of a data set once, the work spread over the processes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm

from vgr_trl.errors import DataError

Found = TypeVar("Found")


def scan(dataset: Dataset, examine: Callable[[Mapping[str, Any]], Found], description: str) -> list[Found]:
    """Return `examine(row)` of every row, in order, on every process.

    Each process examines its share; an exception on one is raised on all, so that none waits for another.

    Raises:
        DataError: examining a row failed, with the exception's words.
    """
    state = PartialState()
    share = range(state.process_index, len(dataset), state.num_processes)
    found: list[tuple[int, Found]] = []
    failure: str | None = None
    try:
        bar = tqdm(share, desc=description, delay=3, disable=not state.is_local_main_process)
        found = [(index, examine(dataset[index])) for index in bar]
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if state.num_processes == 1:
            raise
    shares = gather_object([(found, failure)])
    for _, other in shares:
        if other is not None:
            raise DataError(f"{description} failed: {other}")
    results = dict(pair for pairs, _ in shares for pair in pairs)
    return [results[index] for index in range(len(dataset))]
