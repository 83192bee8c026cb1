"""Reward files of EasyR1 and MTRL: one call returns several scores, each of which can be a reward."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, cast

from vgr_trl.registries import import_file
from vgr_trl.rewards.answers import completion_text, excerpt
from vgr_trl.utils import RewardError, kill_workers, pool

OVERALL = "overall"
# First parameter -> form.
_FORMS = {"reward_inputs": "batch", "reward_input": "sequential", "data_dict": "sequential"}
_cached_pool = cache(pool)


@dataclass(frozen=True)
class FileOptions:
    """Options for calling reward files.

    Args:
        form: `batch` or `sequential`; None: `REWARD_TYPE` in the file, else by the name of the first parameter.
        processes: worker processes for a sequential function; 1: call it in this process.
        arguments: extra keyword arguments.
    """

    form: str | None = None
    processes: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)


def is_easyr1_reward(function: Any) -> bool:
    """Whether `function` is a reward of EasyR1 or MTRL, by its first parameter or the constants of its module."""
    if not inspect.isfunction(function):
        return False
    names = list(inspect.signature(function).parameters)
    if not names or set(names) & {"prompts", "completions", "completion_ids"}:
        return False
    module = sys.modules.get(function.__module__)
    return names[0] in _FORMS or hasattr(module, "REWARD_TYPE") or hasattr(module, "REWARD_NAME")


class ScoredFile:
    """One score of an EasyR1 reward function as a reward; the reward `overall` also logs the other scores.

    Such a function takes a dict per completion (`response`, `response_length`, `ground_truth`, `prompt`) and returns
    its scores. Sequential form: one dict, also with `images`, to a dict of scores or a pair (reward, metrics). Batch
    form: a list of the completions of all processes to a list, or a pair of lists. A completion's scores may include
    `token_weights`.

    Raises:
        RewardError: the function does not accept the extra arguments, or its `REWARD_TYPE` is unknown.
    """

    def __init__(self, function: Callable[..., Any], key: str, options: FileOptions) -> None:
        self.__name__ = function.__name__ if key == OVERALL else key
        self.function, self.key, self.file_options = function, key, options
        self.source = f"{Path(inspect.getfile(function)).read_text(encoding='utf-8')}{options}"
        self.computed: dict[str, Any] = {}  # last completions and their scores, shared by all scores of the function
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [name for name in options.arguments if not takes_all and name not in parameters]:
            accepted = ", ".join(list(parameters)[1:]) or "none"
            raise RewardError(
                f"reward_function_kwargs has {unknown[0]!r}, but {function.__name__} accepts {accepted}: correct it."
            )
        module_form = getattr(sys.modules.get(function.__module__), "REWARD_TYPE", None)
        self.form = str(module_form or options.form or _FORMS.get(next(iter(parameters)), "batch"))
        if self.form not in _FORMS.values():
            raise RewardError(f"{function.__name__} has the reward type {self.form!r}: give batch or sequential.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return this score for each completion of this process."""
        last, solution = self.computed, columns.get("solution")
        if not last or last["completions"] is not completions or last["solution"] is not solution:
            scores = self._score_rows(_build_inputs(completions, columns, with_images=self.form == "sequential"))
            last.update(completions=completions, solution=solution, scores=scores)
        scores = last["scores"]
        if self.key == OVERALL and (log := columns.get("log_metric")) is not None:
            for key in sorted({key for row in scores for key in row}):
                if values := [float(row[key]) for row in scores if isinstance(row.get(key), Real)]:
                    log(f"reward/{key}", sum(values) / len(values))
        if (other := next((row for row in scores if self.key not in row), None)) is not None:
            raise RewardError(f"{self.function.__name__} returned no {self.key!r}, but {', '.join(other)}: name one.")
        return [row[self.key] for row in scores]

    def _score_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.form == "sequential":
            return [self._parse_scores(returned) for returned in self._score_sequentially(rows)]
        from accelerate import PartialState  # imports torch, which worker processes do not need
        from accelerate.utils import gather_object

        everything, lengths = gather_object(rows), gather_object([len(rows)])
        scores = self._parse_batch(self.function(everything, **self.file_options.arguments), len(everything))
        start = sum(lengths[: PartialState().process_index])
        return scores[start : start + len(rows)]

    def _score_sequentially(self, rows: list[dict[str, Any]]) -> list[Any]:
        arguments = dict(self.file_options.arguments)
        if self.file_options.processes == 1:
            return [self.function(row, **arguments) for row in rows]
        where = inspect.getfile(self.function), self.function.__name__, arguments
        workers = _cached_pool(self.file_options.processes)
        try:
            return list(workers.map(_score_in_worker, [where] * len(rows), rows, chunksize=4))
        except BaseException as error:  # also KeyboardInterrupt
            kill_workers(workers)
            _cached_pool.cache_clear()
            if not isinstance(error, BrokenProcessPool):
                raise
            raise RewardError(
                f"A process of {self.function.__name__} ended unexpectedly: fix the function, or lower reward_num_cpus."
            ) from error

    def _parse_batch(self, returned: Any, count: int) -> list[dict[str, Any]]:
        if _is_pair(returned):
            lists = {**returned[1], OVERALL: returned[0]}
            returned = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        if not isinstance(returned, list | tuple) or len(returned) != count:
            raise RewardError(
                f"{self.function.__name__} returned {excerpt(returned)} for a batch of {count} completions: return a "
                "list with the scores of each, or set REWARD_TYPE to sequential in its file."
            )
        return [self._parse_scores(row) for row in returned]

    def _parse_scores(self, returned: Any) -> dict[str, Any]:
        if _is_pair(returned):
            return {**returned[1], OVERALL: returned[0]}
        if isinstance(returned, Mapping):
            return dict(returned)
        if isinstance(returned, Real) or getattr(returned, "shape", None) == ():
            return {OVERALL: returned}
        raise RewardError(
            f"{self.function.__name__} returned {excerpt(returned)} for a completion: return its scores, a dict with "
            f"{OVERALL!r}, or a pair (reward, metrics)."
        )


def collect_token_weights(rewards: Iterable[Any]) -> list[Any] | None:
    """Return the `token_weights` that reward files returned for the last completions of this process.

    None for a completion without weights; None instead of the list if there is no reward file.
    """
    scores = [reward.computed["scores"] for reward in rewards if isinstance(reward, ScoredFile)]
    rows = [[row.get("token_weights") for row in rows] for rows in zip(*scores, strict=True)]
    return [next((each for each in row if each is not None), None) for row in rows] if scores else None


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)


def _score_in_worker(where: tuple[str, str, dict[str, Any]], row: dict[str, Any]) -> Any:
    file, name, arguments = where
    return getattr(import_file(file, "reward", RewardError), name)(row, **arguments)


def _build_inputs(completions: Sequence[Any], columns: Mapping[str, Any], with_images: bool) -> list[dict[str, Any]]:
    names = ("completion_ids", "prompts", "solution")
    ids, prompts, solutions = (columns.get(name) or [None] * len(completions) for name in names)
    images = (columns.get("images") or columns.get("image")) if with_images else None
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(map(completion_text, completions)):
        length = len(text if ids[i] is None else ids[i])
        prompt = _last_question(prompts[i])
        rows.append({"response": text, "response_length": length, "ground_truth": solutions[i], "prompt": prompt})
        if images is not None:
            rows[-1]["images"] = images[i] if isinstance(images[i], list) else [images[i]]
    return rows


def _last_question(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return cast("str | None", prompt)
    questions = [message for message in prompt if message.get("role") == "user"]
    return completion_text([{**questions[-1], "role": "assistant"}]) if questions else None
