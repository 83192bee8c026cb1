"""Reward files in the form of EasyR1 and MTRL, called as TRL calls a reward.

Such a function takes a dict per completion (`response`, `response_length`, `ground_truth`, `prompt`) and returns its
scores, of which `overall` is the reward. Sequential: one dict in, with the `images` too; a dict of scores or a pair
(reward, metrics) out. Batch: a list of the completions of all processes in, a list out, or a pair of lists.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.importing import import_file
from vgr_trl.rewards.answers.text import completion_text
from vgr_trl.rewards.time_limit import without_limit
from vgr_trl.worker_processes import kill_workers, pool

OVERALL = "overall"
FORMS = ("batch", "sequential")
_pool = cache(pool)
_PARAMETERS = {"reward_inputs": "batch", "reward_input": "sequential", "data_dict": "sequential"}
_OF_TRL = ("prompts", "completions", "completion_ids")
_MARKS = ("REWARD_TYPE", "REWARD_NAME")


@dataclass(frozen=True)
class FileOptions:
    """How reward files are called.

    Args:
        form: `batch` or `sequential`; None: as `REWARD_TYPE` in the file says, else by the name of the parameter.
        processes: that a sequential function is called in, at least 1; 1: in this one.
        arguments: given to the function besides.
    """

    form: str | None = None
    processes: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.form not in (None, *FORMS):
            raise RewardError(f"reward_type is {self.form!r}: give one of {', '.join(FORMS)}.")
        if isinstance(self.processes, bool) or not isinstance(self.processes, int) or self.processes < 1:
            raise RewardError(f"reward_num_cpus is {self.processes!r}: give a number of processes, at least 1.")


def is_scored(function: Any) -> bool:
    """Whether `function` is in the form of EasyR1 or MTRL: by its parameter, or by what its module says of itself."""
    if not inspect.isfunction(function):
        return False
    names = list(inspect.signature(function).parameters)
    if not names or set(names) & set(_OF_TRL):
        return False
    return names[0] in _PARAMETERS or any(hasattr(sys.modules.get(function.__module__), mark) for mark in _MARKS)


def scored_reward(function: Callable[..., Any], key: str, options: FileOptions) -> "ScoredFile":
    """Return the score `key` of what `function` returns as a reward.

    Raises:
        RewardError: the function does not take the arguments that it is to be given.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_all else [name for name in options.arguments if name not in parameters]
    if unknown:
        raise RewardError(
            f"reward_function_kwargs has {unknown[0]!r}, which {function.__name__} does not take: it takes "
            f"{', '.join(list(parameters)[1:]) or 'no more arguments'}."
        )
    return ScoredFile(_Scores(function, options), key)


def share_scores(rewards: Sequence[Any]) -> None:
    """Let the scores of a function be computed once where several of `rewards` are among them."""
    first: dict[Any, _Scores] = {}
    for reward in rewards:
        if isinstance(reward, ScoredFile):
            reward.scores = first.setdefault(reward.scores.function, reward.scores)


class ScoredFile:
    """One of the scores of a function as a reward; the others are logged by that of `overall`."""

    def __init__(self, scores: "_Scores", key: str) -> None:
        self.scores, self.key = scores, key
        self.__name__ = scores.function.__name__ if key == OVERALL else key

    @property
    def source(self) -> str:
        """The text of the file, and how it is called."""
        return f"{Path(inspect.getfile(self.scores.function)).read_text(encoding='utf-8')}{self.scores.options}"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return this score of each completion."""
        found = self.scores.of(completions, columns)
        log = columns.get("log_metric")
        if self.key == OVERALL and log is not None and found:
            for key in sorted({key for row in found for key in row}):
                values = [float(row[key]) for row in found if isinstance(row.get(key), Real)]
                if values:
                    log(f"reward/{key}", sum(values) / len(values))
        return [self._of(row) for row in found]

    def _of(self, row: Mapping[str, Any]) -> Any:
        if self.key not in row:
            raise RewardError(
                f"{self.scores.function.__name__} returned no {self.key!r}, but {', '.join(row) or 'nothing'}: name "
                "one of these."
            )
        return row[self.key]


class _Scores:
    def __init__(self, function: Callable[..., Any], options: FileOptions) -> None:
        self.function, self.options = function, options
        module = sys.modules.get(function.__module__)
        by_parameter = _PARAMETERS.get(next(iter(inspect.signature(function).parameters)), "batch")
        self.form = str(getattr(module, "REWARD_TYPE", None) or options.form or by_parameter)
        if self.form not in FORMS:
            raise RewardError(f"{function.__name__} has REWARD_TYPE {self.form!r}: it can be {' or '.join(FORMS)}.")
        self._given: tuple[Any, Any] = None, None
        self._found: list[dict[str, Any]] = []

    def of(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the scores of the completions of this process."""
        given = completions, columns.get("solution")
        if any(new is not old for new, old in zip(given, self._given, strict=True)):
            images = (columns.get("images") or columns.get("image")) if self.form == "sequential" else None
            self._given, self._found = given, self._scored(_rows(completions, columns, images))
        return self._found

    def _scored(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.form == "sequential":
            return [self._read(returned) for returned in self._one_by_one(rows)]
        everything, start = _of_all_processes(rows)
        found = self._read_all(self.function(everything, **self.options.arguments), len(everything))
        return found[start : start + len(rows)]

    def _one_by_one(self, rows: list[dict[str, Any]]) -> list[Any]:
        arguments = dict(self.options.arguments)
        if self.options.processes == 1:
            return [self.function(row, **arguments) for row in rows]
        where = inspect.getfile(self.function), self.function.__name__, arguments
        workers = _pool(self.options.processes)
        try:
            return list(workers.map(_score_elsewhere, [where] * len(rows), rows, chunksize=4))
        except BaseException as error:  # the limit of reward_timeout among them
            with without_limit():
                kill_workers(workers)
                _pool.cache_clear()
            if not isinstance(error, BrokenProcessPool):
                raise
            raise RewardError(
                f"A process of {self.function.__name__} ended unexpectedly, for want of memory or by the function "
                "itself: mend it, or lower reward_num_cpus."
            ) from error

    def _read_all(self, returned: Any, count: int) -> list[dict[str, Any]]:
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            rewards, metrics = returned
            columns = {key: list(values) for key, values in metrics.items()} | {OVERALL: list(rewards)}
            lengths = {len(values) for values in columns.values()}
            returned = [dict(zip(columns, row, strict=False)) for row in zip(*columns.values(), strict=False)]
            if len(lengths) > 1:
                raise RewardError(f"{self.function.__name__} returned lists of the lengths {sorted(lengths)}.")
        if isinstance(returned, Mapping) or not hasattr(returned, "__len__") or len(returned) != count:
            raise RewardError(
                f"{self.function.__name__} returned {_shown(returned)} for a batch of {count} completions: return a "
                "list with the scores of each, or set REWARD_TYPE to sequential in its file."
            )
        return [self._read(row) for row in returned]

    def _read(self, returned: Any) -> dict[str, Any]:
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            return {**returned[1], OVERALL: returned[0]}
        if isinstance(returned, Mapping):
            return dict(returned)
        if isinstance(returned, Real) or getattr(returned, "shape", None) == ():
            return {OVERALL: returned}
        raise RewardError(
            f"{self.function.__name__} returned {_shown(returned)} for a completion: return its scores, a dict with "
            f"{OVERALL!r}, or a pair (reward, metrics)."
        )


def _of_all_processes(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The rows of all processes, and the place of the first of this one."""
    from accelerate import PartialState  # with torch, which processes of a sequential function do without
    from accelerate.utils import gather_object

    state = PartialState()
    if state.num_processes == 1:
        return rows, 0
    with without_limit():
        return gather_object(rows), sum(gather_object([len(rows)])[: state.process_index])


def _score_elsewhere(where: tuple[str, str, dict[str, Any]], row: dict[str, Any]) -> Any:
    file, name, arguments = where
    return getattr(import_file(file, "reward", RewardError), name)(row, **arguments)


def _rows(completions: Sequence[Any], columns: Mapping[str, Any], images: Any) -> list[dict[str, Any]]:
    count = len(completions)
    ids = columns.get("completion_ids") or [None] * count
    prompts = columns.get("prompts") or [None] * count
    solutions = columns.get("solution") or [None] * count
    rows = []
    for i, completion in enumerate(completions):
        text = completion_text(completion)
        row = {"response": text, "response_length": len(text if ids[i] is None else ids[i])}
        rows.append(row | {"ground_truth": solutions[i], "prompt": _asked(prompts[i])})
        if images is not None:
            rows[-1]["images"] = images[i] if isinstance(images[i], list) else [images[i]]
    return rows


def _asked(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        text: str | None = prompt
        return text
    questions = [message for message in prompt if message.get("role") == "user"]
    return completion_text([{**questions[-1], "role": "assistant"}]) if questions else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
