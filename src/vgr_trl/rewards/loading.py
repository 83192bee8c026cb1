"""How rewards come to a trainer: by name, path or file of EasyR1, weighted by step, and their results checked."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial, wraps
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any

from vgr_trl import registries
from vgr_trl.registries import import_file
from vgr_trl.rewards.accuracy import accuracy_reward, blind_accuracy_reward
from vgr_trl.rewards.answers import completion_text, excerpt
from vgr_trl.rewards.attention import mdi_reward, region_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.groups import WholeGroups, at_most, innermost, is_asynchronous, without_limit
from vgr_trl.rewards.simple import get_soft_overlong_punishment, tag_count_reward, think_format_reward
from vgr_trl.utils import ConfigError, RewardError, kill_workers, pool

OVERALL = "overall"
FORMS = ("batch", "sequential")
_pool = cache(pool)
_PARAMETERS = {"reward_inputs": "batch", "reward_input": "sequential", "data_dict": "sequential"}


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


for _names, _reward in (
    (("accuracy", "accuracy_reward"), accuracy_reward),
    (("format", "think_format_reward"), think_format_reward),
    (("tag_count", "tag_count_reward"), tag_count_reward),
    (("vgr", "vgr_reward"), vgr_reward),
    (("vgr_hard_negative", "vgr_hard_negative_reward"), vgr_hard_negative_reward),
    (("mdi", "mdi_reward"), mdi_reward),
    (("region", "region_reward"), region_reward),
    (("blind_accuracy", "blind_accuracy_reward"), blind_accuracy_reward),
    (("length", "soft_overlong", "get_soft_overlong_punishment"), get_soft_overlong_punishment),
):
    registries.rewards.register(*_names)(_reward)
_HARD: dict[Any, Any] = {
    vgr_reward: vgr_hard_negative_reward,
    "vgr": "vgr_hard_negative",
    "vgr_reward": "vgr_hard_negative_reward",
}
_KEY = re.compile(r"(.*?)(?:\[(\w+)\])?", re.DOTALL)


def is_reward_name(spec: Any) -> bool:
    """Whether a text names a reward, not a reward model: a known name, a file's or a dotted path, and no folder."""
    if not isinstance(spec, str) or Path(spec).is_dir():
        return False
    name = str(spec).strip().partition("[")[0]
    dotted = "." in name and all(part.isidentifier() for part in re.split("[.:]", name))
    return ".py:" in name or dotted or name in registries.rewards.names()


def load_rewards(
    specs: Iterable[Any], *, options: Mapping[str, Any] | None = None, **how: Any
) -> list[Callable[..., Any]]:
    """Return the reward functions that `specs` name, in their order.

    Args:
        options: of all plug-ins of a run, from which each reward takes its own.
        how: further arguments of `load_reward`.

    Raises:
        RewardError: one cannot be loaded, or is named twice, whose metrics would be one.
    """
    specs = [specs] if isinstance(specs, str) else list(specs)
    rewards = [_loaded(spec, options or {}, **how) for spec in specs]
    for place, reward in enumerate(rewards):
        if reward in rewards[:place] or specs[place] in specs[:place]:
            raise RewardError(f"The reward {specs[place]} is named twice: name it once, and give it a larger weight.")
    first: dict[Any, ScoredFile] = {}
    for reward in rewards:
        if isinstance(reward, ScoredFile):  # the scores of a function are computed once for all its rewards
            reward.computed = first.setdefault(reward.function, reward).computed
    return rewards


def load_reward(
    spec: Any,
    *,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the reward function that `spec` names.

    Args:
        spec: a name (`accuracy`, `format`, `length`, or one that an installed package registers as entry point of the
            group `vgr_trl.rewards`), a dotted path `my_package.rewards.my_reward`, or a file
            `my_rewards.py:my_reward`, relative to the working directory or absolute. A function is returned as it is,
            unless `options` are given. Of a function in the form of EasyR1 it is the score `overall`, with `[accuracy]`
            behind it another one.
        max_completion_length: tokens, for `length`.
        soft_punish_cache: tokens, for `length`; None: a fifth of `max_completion_length`, the ratio of DAPO
            (https://huggingface.co/papers/2503.14476).
        files: how functions in the form of EasyR1 are called; None: as their files say.
        options: values of the options that the reward declares, by name; the others have their defaults.

    Raises:
        RewardError: nothing has this name, two packages have it, it cannot be imported, it is not a function, or it
            declares no such option.
    """
    reward = _loaded(spec, options or {}, max_completion_length, soft_punish_cache, files)
    own = registries.option_class(reward, reward_name(reward))
    known = [] if own is None else [field.name for field in fields(own)]
    for name in options or ():
        if name not in known:
            accepted = ", ".join(known) or "none, as it declares none"
            raise RewardError(f"The reward {reward_name(reward)} has no option {name!r}: give {accepted}.")
    return reward


def _loaded(
    spec: Any,
    options: Mapping[str, Any],
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    files: FileOptions | None = None,
) -> Callable[..., Any]:
    name, key = _KEY.fullmatch(spec.strip()).groups() if isinstance(spec, str) else (spec, None)  # type: ignore[union-attr]  # the first part takes anything
    reward: Callable[..., Any] = registries.rewards.load(name)
    if is_scored(reward) and isinstance(spec, str):
        return ScoredFile(reward, key or OVERALL, files or FileOptions())
    if key is not None:
        raise RewardError(f"The reward {spec!r} names the score {key!r}, but {name} returns one number: drop [{key}].")
    if reward is get_soft_overlong_punishment:
        if max_completion_length is None:
            raise RewardError(
                f"The reward {name!r} needs max_completion_length, which is None: give it as a number of tokens."
            )
        cache = max_completion_length // 5 if soft_punish_cache is None else soft_punish_cache
        return get_soft_overlong_punishment(max_completion_length, cache)
    return reward if reward is spec and not options else _bound(reward, repr(name), options)


def _bound(reward: Callable[..., Any], name: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward with its own options as named arguments, if it declares any."""
    options = registries.option_class(reward, name)
    if options is None:
        return reward
    filled = partial(reward, **vars(registries.option_values(options, given)))

    @wraps(reward)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return filled(*args, **kwargs)

    bound.__signature__ = inspect.signature(filled)  # type: ignore[attr-defined]
    return bound


def hardened(rewards: Iterable[Any]) -> list[Any]:
    """Return reward functions, or names of them, with the hard negatives of `vgr` in the place of `vgr`.

    Raises:
        RewardError: there is neither among them.
    """
    rewards = list(rewards)
    changed = [_HARD.get(reward, reward) if isinstance(reward, str | FunctionType) else reward for reward in rewards]
    if not any(reward in _HARD.values() for reward in changed if isinstance(reward, str | FunctionType)):
        names = " ".join(map(reward_name, rewards))
        raise RewardError(
            f"vgr_hard_negative is on, but the reward functions are {names or 'none'}: name vgr there, or switch it "
            "off."
        )
    return changed


def is_scored(function: Any) -> bool:
    """Whether `function` is in the form of EasyR1 or MTRL: by its parameter, or by what its module says of itself."""
    if not inspect.isfunction(function):
        return False
    names = list(inspect.signature(function).parameters)
    if not names or set(names) & {"prompts", "completions", "completion_ids"}:
        return False
    module = sys.modules.get(function.__module__)
    return names[0] in _PARAMETERS or hasattr(module, "REWARD_TYPE") or hasattr(module, "REWARD_NAME")


class ScoredFile:
    """One of the scores of a function in the form of EasyR1 as a reward; that of `overall` logs the others.

    Such a function takes a dict per completion (`response`, `response_length`, `ground_truth`, `prompt`) and returns
    its scores, of which `overall` is the reward. Sequential: one dict in, with the `images` too; a dict of scores or a
    pair (reward, metrics) out. Batch: a list of the completions of all processes in, a list out, or a pair of lists.

    Raises:
        RewardError: the function does not take the arguments that it is to be given, or its file names no form.
    """

    def __init__(self, function: Callable[..., Any], key: str, options: FileOptions) -> None:
        self.__name__ = function.__name__ if key == OVERALL else key
        self.function, self.key, self.file_options = function, key, options
        self.source = f"{Path(inspect.getfile(function)).read_text(encoding='utf-8')}{options}"
        self.computed: dict[str, Any] = {}  # the last completions and their scores, also of other keys of the function
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [name for name in options.arguments if not takes_all and name not in parameters]:
            raise RewardError(
                f"reward_function_kwargs has {unknown[0]!r}, which {function.__name__} does not take: it takes "
                f"{', '.join(list(parameters)[1:]) or 'no more arguments'}."
            )
        of_module = getattr(sys.modules.get(function.__module__), "REWARD_TYPE", None)
        self.form = str(of_module or options.form or _PARAMETERS.get(next(iter(parameters)), "batch"))
        if self.form not in FORMS:
            raise RewardError(f"{function.__name__} has REWARD_TYPE {self.form!r}: it can be {' or '.join(FORMS)}.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return this score of each completion of this process."""
        solution = columns.get("solution")
        last = self.computed.get("of")
        if last is None or last[0] is not completions or last[1] is not solution:
            scores = self._scored(_rows(completions, columns, with_images=self.form == "sequential"))
            self.computed.update(of=(completions, solution), scores=scores)
        scores = self.computed["scores"]
        if self.key == OVERALL and (log := columns.get("log_metric")) is not None:
            for key in sorted({key for row in scores for key in row}):
                if values := [float(row[key]) for row in scores if isinstance(row.get(key), Real)]:
                    log(f"reward/{key}", sum(values) / len(values))
        for row in scores:
            if self.key not in row:
                raise RewardError(
                    f"{self.function.__name__} returned no {self.key!r}, but {', '.join(row) or 'nothing'}: name one "
                    "of these."
                )
        return [row[self.key] for row in scores]

    def _scored(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.form == "sequential":
            return [self._read(returned) for returned in self._one_by_one(rows)]
        from accelerate import PartialState  # with torch, which processes of a sequential function do without
        from accelerate.utils import gather_object

        with without_limit():
            everything, lengths = gather_object(rows), gather_object([len(rows)])
        scores = self._read_all(self.function(everything, **self.file_options.arguments), len(everything))
        start = sum(lengths[: PartialState().process_index])
        return scores[start : start + len(rows)]

    def _one_by_one(self, rows: list[dict[str, Any]]) -> list[Any]:
        arguments = dict(self.file_options.arguments)
        if self.file_options.processes == 1:
            return [self.function(row, **arguments) for row in rows]
        where = inspect.getfile(self.function), self.function.__name__, arguments
        workers = _pool(self.file_options.processes)
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
                "itself: correct it, or lower reward_num_cpus."
            ) from error

    def _read_all(self, returned: Any, count: int) -> list[dict[str, Any]]:
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            columns = {**returned[1], OVERALL: returned[0]}
            if len(lengths := {len(values) for values in columns.values()}) > 1:
                raise RewardError(f"{self.function.__name__} returned lists of the lengths {sorted(lengths)}.")
            returned = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if not isinstance(returned, list | tuple) or len(returned) != count:
            raise RewardError(
                f"{self.function.__name__} returned {excerpt(returned)} ({type(returned).__name__}) for a batch of "
                f"{count} completions: return a list with the scores of each, or set REWARD_TYPE to sequential in its "
                "file."
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
            f"{self.function.__name__} returned {excerpt(returned)} ({type(returned).__name__}) for a completion: "
            f"return its scores, a dict with {OVERALL!r}, or a pair (reward, metrics)."
        )


def _score_elsewhere(where: tuple[str, str, dict[str, Any]], row: dict[str, Any]) -> Any:
    file, name, arguments = where
    return getattr(import_file(file, "reward", RewardError), name)(row, **arguments)


def _rows(completions: Sequence[Any], columns: Mapping[str, Any], with_images: bool) -> list[dict[str, Any]]:
    absent: Any = [None] * len(completions)
    ids = columns.get("completion_ids") or absent
    prompts, solutions = columns.get("prompts") or absent, columns.get("solution") or absent
    images = (columns.get("images") or columns.get("image")) if with_images else None
    rows = []
    for i, completion in enumerate(completions):
        text = completion_text(completion)
        row = {"response": text, "response_length": len(text if ids[i] is None else ids[i])}
        rows.append(row | {"ground_truth": solutions[i], "prompt": _question(prompts[i])})
        if images is not None:
            rows[-1]["images"] = images[i] if isinstance(images[i], list) else [images[i]]
    return rows


def _question(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        text: str | None = prompt
        return text
    questions = [message for message in prompt if message.get("role") == "user"]
    return completion_text([{**questions[-1], "role": "assistant"}]) if questions else None


def reward_name(reward: Any) -> str:
    """Return the name of a reward function, or of the reward model given as a path or as a model."""
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    name = getattr(reward, "__name__", None)
    if name is None and (path := getattr(getattr(reward, "config", None), "_name_or_path", None)):
        return str(path).split("/")[-1]
    return name or type(reward).__name__


@dataclass(frozen=True)
class RewardSchedule:
    """Weights of the rewards: `early` ones for the first steps if given, `regular` ones after (one each per reward)."""

    regular: tuple[float, ...]
    early: tuple[float, ...] | None = None

    @classmethod
    def for_rewards(
        cls,
        rewards: Sequence[Any],
        reward_weights: Sequence[float] | None = None,
        early_reward_weights: Sequence[float] | None = None,
    ) -> "RewardSchedule":
        """Return the schedule for `rewards`, in their order.

        Args:
            reward_weights: one finite weight per reward; None: 1 each.
            early_reward_weights: one finite weight per reward, for the early steps; None: `reward_weights` always.

        Raises:
            ConfigError: the number of weights is not that of the rewards, or a weight is not a finite number.
        """
        names = [reward_name(reward) for reward in rewards]
        regular = _weights("reward_weights", reward_weights, names)
        early = _weights("early_reward_weights", early_reward_weights, names)
        return cls(regular if regular is not None else (1.0,) * len(names), early)

    @property
    def changes(self) -> bool:
        """Whether the weights depend on the step."""
        return self.early is not None and self.early != self.regular

    def early_steps(self, warmup_steps: int, total_steps: int) -> int:
        """Return for how many steps the early weights hold: the warm-up, else the first 10 % of all, rounded up."""
        return int(warmup_steps) if warmup_steps > 0 else max(-(-int(total_steps) // 10), 0)

    def weights_at(self, step: int, early_steps: int) -> list[float]:
        """Return the weights that hold at the 0-based global `step`: the early ones while it is below `early_steps`."""
        return list(self.early if self.early is not None and step < early_steps else self.regular)


def _weights(option: str, weights: Sequence[float] | None, names: list[str]) -> tuple[float, ...] | None:
    if weights is None:
        return None
    numbers = [weight for weight in weights if isinstance(weight, int | float) and math.isfinite(weight)]
    if len(numbers) != len(weights) or len(numbers) != len(names):
        raise ConfigError(
            f"{option} is {weights!r}, {len(weights)} values but there are {len(names)} reward functions "
            f"({', '.join(names)}): give one weight per function, a finite number, in this order."
        )
    return tuple(map(float, numbers))


ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def reads_solution(reward: Any) -> bool:
    """Whether a reward compares an answer with what the data say is right."""
    return innermost(reward) in (accuracy_reward, blind_accuracy_reward)


def check_callable(reward: Any, columns: Iterable[str]) -> None:
    """Raise `RewardError` if calling `reward` with the data's columns must fail, or can only give None.

    Args:
        reward: a reward function; models are not looked at.
        columns: of the data, each of which is passed as a list.
    """
    columns, name = list(columns), reward_name(reward)
    needed = reward.required if isinstance(reward, WholeGroups) else ()
    missing = [column for column in needed if column not in {*columns, *ALWAYS_PASSED}]
    if reads_solution(reward) and not {"solution", "label_idx"} & set(columns):
        missing = ["solution"]
    if missing:
        raise RewardError(f"The reward {name} needs the column {missing[0]!r}, but the data have {columns}: add it.")
    if isinstance(reward, WholeGroups) or not callable(reward) or hasattr(reward, "forward"):
        return
    try:
        passed = dict.fromkeys([*ALWAYS_PASSED, *columns])
        inspect.signature(reward).bind(**{key: None for key in passed if key not in ("prompt", "completion")})
    except TypeError as error:
        raise RewardError(
            f"The reward {name} cannot be called with what is passed to it ({error}): take `completions`, the columns "
            f"that you use (of {columns}), and **kwargs."
        ) from error
    except ValueError:  # a built-in function without a signature
        return


def checked(
    reward: Any,
    name: str,
    on_nan: Callable[[str, int], None],
    trainer: object = None,
    seconds: float | None = None,
) -> Callable[..., Any]:
    """Return `reward`, asynchronous if it is, such that it returns a list of floats and Nones or fails with its name.

    Args:
        reward: called with keywords only, `completions` among them.
        on_nan: called with the name and the number of NaN that the reward returned, if there are any.
        trainer: passed as `trainer` to a reward that takes it, by name or among `**kwargs`; None: to none.
        seconds: that one call may take; None: any number. Asynchronous rewards, which limit themselves, may take any.
    """
    given = {"trainer": trainer} if trainer is not None and _takes(reward, "trainer") else {}
    if is_asynchronous(innermost(reward)):

        async def call_async(**kwargs: Any) -> list[float | None]:
            return _read(await reward(**given | kwargs), len(kwargs["completions"]), name, on_nan)

        return call_async

    def call(**kwargs: Any) -> list[float | None]:
        with at_most(seconds, name), _restored(kwargs):
            return _read(reward(**given | kwargs), len(kwargs["completions"]), name, on_nan)  # a generator runs here

    return call


@contextmanager
def _restored(columns: dict[str, Any]) -> Iterator[None]:
    """After this block all lists and dicts in the columns are what they were: others read them too."""
    before = [(each, each.copy()) for each in _containers(list(columns.values()))]
    yield
    for each, items in before:
        each.clear()
        each.extend(items) if isinstance(each, list) else each.update(items)


def _containers(items: Iterable[Any]) -> Iterator[Any]:
    """The lists and dicts among `items`, and those in them; images and tensors are left alone."""
    for item in items:
        if isinstance(item, list | dict):
            yield item
            yield from _containers(item.values() if isinstance(item, dict) else item)


def _takes(reward: Any, name: str) -> bool:
    """Whether a reward can be called with a keyword that no `functools.partial` has bound."""
    if name in getattr(reward, "keywords", {}):
        return False
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a built-in function without a signature
        return False
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _read(returned: Any, count: int, name: str, on_nan: Callable[[str, int], None]) -> list[float | None]:
    expected = f"return a list of one number per completion ({count}), None where it does not apply"
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__iter__"):
        raise RewardError(f"The reward {name} returned {excerpt(returned)} ({type(returned).__name__}): {expected}.")
    values = list(returned)
    if len(values) != count:
        raise RewardError(f"The reward {name} returned {len(values)} rewards: {expected}.")
    rewards = [_number(value, row, name) for row, value in enumerate(values)]
    if undefined := sum(reward is not None and math.isnan(reward) for reward in rewards):
        on_nan(name, undefined)
    return rewards


def _number(value: Any, row: int, name: str) -> float | None:
    if value is None:
        return None
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, Real):
        raise RewardError(
            f"The reward {name} returned {excerpt(value)} ({type(value).__name__}) for completion {row}: give a "
            "number, or None where it does not apply."
        )
    try:
        return float(number)
    except OverflowError:  # all processes refuse infinite rewards together
        return math.inf if value > 0 else -math.inf
