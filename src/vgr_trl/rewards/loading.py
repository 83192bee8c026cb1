"""Load rewards by name or path, and call reward files of EasyR1."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import cache, partial, update_wrapper
from numbers import Real
from pathlib import Path
from typing import Any

from vgr_trl import registries
from vgr_trl.errors import RewardError
from vgr_trl.processes import kill_workers, pool
from vgr_trl.rewards.answers import completion_text, excerpt
from vgr_trl.rewards.calling import reward_name
from vgr_trl.rewards.functions import get_soft_overlong_punishment, vgr_hard_negative_reward, vgr_reward

# Reward files of EasyR1 and MTRL: one call returns several scores, each of which can be a reward.

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


def is_easyr1_reward(function: Any, form: str | None = None) -> bool:
    """Return whether a function is a reward of EasyR1 or MTRL, by its first parameter or its module's constants.

    Args:
        function: the reward.
        form: the form of reward files if the user states it; then every function is one that takes no completions.
    """
    if not inspect.isfunction(function):
        return False
    names = list(inspect.signature(function).parameters)
    if not names or set(names) & {"prompts", "completions", "completion_ids"}:
        return False
    has_constants = not _module_names(function).keys().isdisjoint({"REWARD_TYPE", "REWARD_NAME"})
    return form is not None or names[0] in _FORMS or has_constants


def _module_names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names that the module of a function defines."""
    module = sys.modules.get(function.__module__)
    return {} if module is None else vars(module)


class ScoredFile:
    """One score of an EasyR1 reward function, as a reward; `overall` also logs the other scores.

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
        self.computed: dict[str, Any] = {}  # last completions and their scores, shared by all scores of the function
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [name for name in options.arguments if not takes_all and name not in parameters]:
            accepted = f"but {function.__name__} accepts {', '.join(list(parameters)[1:]) or 'none'}"
            raise RewardError(f"reward_function_kwargs has {unknown[0]!r}, {accepted}: correct it.")
        module_form = _module_names(function).get("REWARD_TYPE")
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
        if (lacking := next((row for row in scores if self.key not in row), None)) is not None:
            raise RewardError(f"{self.function.__name__} returned no {self.key!r}, but {', '.join(lacking)}: name one.")
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
            ended = f"A process of {self.function.__name__} ended unexpectedly"
            raise RewardError(f"{ended}: fix the function, or lower reward_num_cpus.") from error

    def _parse_batch(self, returned: Any, count: int) -> list[dict[str, Any]]:
        if _is_pair(returned):
            lists = {key: values for key, values in {**returned[1], OVERALL: returned[0]}.items() if values is not None}
            returned = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        if not isinstance(returned, list | tuple) or len(returned) != count:
            batch = f"{self.function.__name__} returned {excerpt(returned)} for a batch of {count} completions"
            raise RewardError(f"{batch}: return the scores of each, or set REWARD_TYPE to sequential in its file.")
        return [self._parse_scores(row) for row in returned]

    def _parse_scores(self, returned: Any) -> dict[str, Any]:
        if _is_pair(returned):
            return {**returned[1], OVERALL: returned[0]}
        if isinstance(returned, Mapping):
            return dict(returned)
        if isinstance(returned, Real) or getattr(returned, "shape", None) == ():
            return {OVERALL: returned}
        returned = f"{self.function.__name__} returned {excerpt(returned)} for a completion"
        raise RewardError(f"{returned}: return its scores, a dict with {OVERALL!r}, or a pair (reward, metrics).")


def collect_token_weights(rewards: Iterable[Any]) -> list[Any] | None:
    """Return the `token_weights` that reward files returned for the last completions of this process.

    None for a completion without weights; None instead of the list if there is no reward file.
    """
    scores = [reward.computed["scores"] for reward in rewards if isinstance(reward, ScoredFile)]
    rows = [[row.get("token_weights") for row in rows] for rows in zip(*scores, strict=True)]
    return [next((weights for weights in row if weights is not None), None) for row in rows] if scores else None


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)


def _score_in_worker(where: tuple[str, str, dict[str, Any]], row: dict[str, Any]) -> Any:
    file, name, arguments = where
    return vars(registries.import_file(file, "reward", RewardError))[name](row, **arguments)


def _build_inputs(completions: Sequence[Any], columns: Mapping[str, Any], with_images: bool) -> list[dict[str, Any]]:
    names = ("completion_ids", "prompts", "solution")
    ids, prompts, solutions = (columns.get(name) or [None] * len(completions) for name in names)
    images = (columns.get("images") or columns.get("image")) if with_images else None
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(map(completion_text, completions)):
        length, prompt = len(text if ids[i] is None else ids[i]), prompts[i]
        if isinstance(prompt, list):  # its last question
            questions = [message["content"] for message in prompt if message.get("role") == "user"]
            prompt = completion_text([{"content": content} for content in questions[-1:]])
        rows.append({"response": text, "response_length": length, "ground_truth": solutions[i], "prompt": prompt})
        if images is not None:
            rows[-1]["images"] = images[i] if isinstance(images[i], list) else [images[i]]
    return rows


def is_reward_name(spec: Any) -> bool:
    """Return whether a text names a reward function (registered name, file or dotted path), not a reward model."""
    if not isinstance(spec, str) or Path(spec).is_dir():
        return False
    name = str(spec).strip().partition("[")[0]
    dotted = "." in name and all(part.isidentifier() for part in re.split("[.:]", name))
    return ".py:" in name or dotted or name in registries.rewards.names()


def load_rewards(
    specs: Iterable[Any],
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Callable[..., Any]]:
    """Load the reward functions that `specs` name, in order.

    Args:
        specs: the rewards, each a name (`accuracy`, `format`, `length`, or an entry point of an installed package in
            the group `vgr_trl.rewards`), a dotted path `my_package.rewards.my_reward`, or a file
            `my_rewards.py:my_reward`, relative to the working directory or absolute. A function is returned unchanged
            unless `options` are given. An EasyR1 function gives the score `overall`; append `[accuracy]` for another
            score.
        max_completion_length: tokens, for `length`.
        soft_punish_cache: tokens, for `length`; None: a fifth of `max_completion_length`, the ratio of DAPO
            (https://huggingface.co/papers/2503.14476).
        files: how EasyR1 functions are called; None: as their files say, with `options`.
        options: values of the options that the rewards declare, by name.

    Raises:
        RewardError: a name is unknown or registered twice, an import fails, an object is not a function, a reward is
            named twice, so that its metrics would collide, or no reward declares an option.
    """
    specs = [specs] if isinstance(specs, str) else list(specs)
    rewards: list[Callable[..., Any]] = []
    for spec in specs:
        name, key = spec, ""
        if isinstance(spec, str):
            name, _, key = spec.strip().removesuffix("]").partition("[")
        reward: Any = registries.rewards.load(name)
        form = files.form if files is not None and ".py:" in str(spec) else None
        if is_easyr1_reward(reward, form) and isinstance(spec, str):
            reward = ScoredFile(reward, key or OVERALL, files or FileOptions(arguments=options or {}))
            same = [file for file in rewards if isinstance(file, ScoredFile) and file.function is reward.function]
            reward.computed = same[0].computed if same else {}  # call the function once for all its scores
        elif key:
            raise RewardError(f"The reward {spec!r} asks for a score, but {name} returns one number: remove [{key}].")
        elif reward is get_soft_overlong_punishment:
            if max_completion_length is None:
                raise RewardError(f"The reward {name!r} needs max_completion_length, which is None: give it in tokens.")
            cache = max_completion_length // 5 if soft_punish_cache is None else soft_punish_cache
            reward = get_soft_overlong_punishment(max_completion_length, cache)
        elif reward is not spec or options:
            reward = _bind_options(reward, options or {})
        if reward in rewards or specs.count(spec) > 1:
            raise RewardError(f"The reward {spec} is named twice: name it once, with a larger weight.")
        rewards.append(reward)
    declared = filter(None, map(registries.declared_options, rewards))
    valid = {option.name for group in declared for option in fields(group)}
    unknown = set(options or ()) - valid
    if unknown and not any(isinstance(reward, ScoredFile) for reward in rewards):
        names, accepted = ", ".join(map(reward_name, rewards)), ", ".join(sorted(valid)) or "none, as none is declared"
        raise RewardError(f"The reward {names} has no option {unknown.pop()!r}: give {accepted}.")
    return rewards


def load_reward(spec: Any, **settings: Any) -> Callable[..., Any]:
    """Load the reward function that `spec` names, with arguments and errors of `load_rewards`."""
    (reward,) = load_rewards([spec], **settings)
    return reward


def _bind_options(reward: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind the options that a reward declares as keyword arguments."""
    if (options := registries.declared_options(reward)) is None:
        return reward
    bound = update_wrapper(partial(reward, **vars(registries.build_options(options, values))), reward)
    del bound.__wrapped__  # or its signature would be that of `reward`
    return bound


def replace_by_hard_negative(rewards: Iterable[Any]) -> list[Any]:
    """Replace `vgr` with `vgr_hard_negative` among reward functions or names.

    Raises:
        RewardError: neither is among them.
    """
    hard = {vgr_reward: vgr_hard_negative_reward, "vgr": "vgr_hard_negative", "vgr_reward": "vgr_hard_negative_reward"}
    rewards = list(rewards)
    changed = [hard.get(reward, reward) for reward in rewards]
    if not set(changed) & set(hard.values()):
        names = " ".join(map(reward_name, rewards)) or "none"
        raise RewardError(f"vgr_hard_negative is on, but the rewards are {names}: add vgr, or turn it off.")
    return changed
