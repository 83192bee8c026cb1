"""Rewards that read the text of one completion, and rewards that compare the attention within a group."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

from vgr_trl import registries
from vgr_trl.errors import RewardError
from vgr_trl.options import check_value
from vgr_trl.registries import BLIND_ANSWERS, declares
from vgr_trl.rewards.answers import completion_text, excerpt, is_right, resolve_solution


@registries.rewards.register("accuracy", "accuracy_reward", "mc_idx_reward")
def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1 for each completion that states the right answer, else 0 (`Stated answer` in definitions.md).

    Example:
        >>> completions = ["<answer>B</answer>", "It is red.", "The answer is 12."]
        >>> choices = [["red", "blue"], None, None]
        >>> accuracy_reward(completions, solution=["B", "blue", "12"], choices=choices)
        [1.0, 0.0, 1.0]

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.
        solution: per completion the letter, 0-based index or text of the right option, or the open answer; if None, the
            column `label_idx` is used, in which a number is always an index.
        choices: per completion the texts of 2 to 10 options, or None for an open question.
        kwargs: other columns, of which `label_idx` is used, and further arguments of TRL.

    Returns:
        N rewards; None if `solution` cannot be resolved.

    Raises:
        RewardError: a column does not have one value per completion, or a completion is not text.
    """
    stated = {"solution": solution, "choices": choices, "label_idx": kwargs.get("label_idx")}
    columns = {name: [None] * len(completions) if values is None else values for name, values in stated.items()}
    for name, values in columns.items():
        if isinstance(values, str) or len(values) != len(completions):
            count = len(completions)
            raise RewardError(f"{name} is {excerpt(values)} for {count} completions: give a list with one for each.")
    return [_grade(*row) for row in zip(map(completion_text, completions), *columns.values(), strict=True)]


def _grade(text: str, *row: Any) -> float | None:
    try:
        return float(is_right(text, resolve_solution(*row)))
    except RewardError:
        return None


@registries.rewards.register("blind_accuracy", "blind_accuracy_reward")
@declares(needs=(BLIND_ANSWERS,))
def blind_accuracy_reward(
    completions: Sequence[Any], blind_answers: Sequence[str | None], **kwargs: Any
) -> list[float | None]:
    """Return the accuracy of answers given without the image, from each completion's description of it: 0 or 1.

    Args:
        completions: N completions; not used otherwise.
        blind_answers: these answers; None (reward 0) if the completion has no description.
        kwargs: other columns, as in `accuracy_reward`.

    Returns:
        N rewards; None if the reference answer cannot be resolved.

    Raises:
        RewardError: as `accuracy_reward`.
    """
    return accuracy_reward([answer or "" for answer in blind_answers], **kwargs)


@registries.rewards.register("tool_reward")
def tool_reward(completions: Sequence[Any], num_returned_images: Sequence[int], **kwargs: Any) -> list[float | None]:
    """Return 1 for each right completion that looked at an image from a tool, else 0.

    DeepEyes (https://huggingface.co/papers/2505.14362) weighs it by 1.2, beside 0.8 for the accuracy.

    Args:
        completions: N completions as TRL passes them.
        num_returned_images: number of images that tools have returned for each completion.
        kwargs: other columns, as in `accuracy_reward`.

    Returns:
        N rewards; None if the reference answer cannot be resolved.

    Raises:
        RewardError: as `accuracy_reward`.
    """
    right = accuracy_reward(completions, **kwargs)
    return [value and value * (count > 0) for value, count in zip(right, num_returned_images, strict=True)]


@registries.rewards.register("tool_cost")
def tool_cost(num_tool_calls: Sequence[int], **kwargs: Any) -> list[float]:
    """Return −1 for each call of a tool; its weight is the price of a call.

    Args:
        num_tool_calls: number of answered calls of each of N completions.
        kwargs: other columns and further arguments of TRL; not used.
    """
    return [-float(count) for count in num_tool_calls]


@registries.rewards.register("paired_tags", "paired_tags_reward")
def paired_tags_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return −1 for each completion whose tags do not pair up or whose answer is too long, else 0, as in DeepEyes.

    It counts `<think>` and `<answer>`. Thoughts that TRL has taken out of the messages of tool calls need no tags. An
    answer of 1,000 characters or more is too long.

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.
        kwargs: further arguments of TRL; not used.

    Raises:
        RewardError: a completion is not text.
    """
    return [-float(_has_faults(completion_text(completion))) for completion in completions]


def _has_faults(text: str) -> bool:
    behind = text.rpartition("</think>")[2]
    pairs = text.count("<think>") == text.count("</think>") and behind.count("<answer>") == behind.count("</answer>")
    return not pairs or len(text.rpartition("<answer>")[2].partition("</answer>")[0].strip()) >= 1000


_WITHOUT_FILLERS = str.maketrans("", "", "\u115f\u1160\u3164\uffa0")  # Hangul fillers, invisible letters in Unicode
_TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_TAG = re.compile(r"</?\w+>")
_WELL_FORMED = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_THOUGHT_AND_TEXT = re.compile(r"\s*<think>(.*)</think>(.*)", re.DOTALL)


@registries.rewards.register("format", "think_format_reward")
def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each completion of the form `<think>…</think><answer>…</answer>`, else 0.

    White space around the parts is allowed. Each tag must occur exactly once; thought and answer must each have
    at least one letter, digit or ideograph (`Rewards` in definitions.md).

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.
        kwargs: further arguments of TRL; not used.

    Raises:
        RewardError: a completion is not text.
    """
    return [float(_matches(completion, _WELL_FORMED)) for completion in completions]


@registries.rewards.register("think_only_format", "think_only_format_reward")
def think_only_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each completion that is one `<think>…</think>` followed by text (`Answer: B`), else 0.

    Thought and text must each have at least one letter, digit or ideograph.

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.

    Raises:
        RewardError: a completion is not text.
    """
    return [float(_matches(completion, _THOUGHT_AND_TEXT)) for completion in completions]


def _matches(completion: Any, form: re.Pattern[str]) -> bool:
    """Whether a completion has this form, each of its tags once, and a visible character in each of its parts."""
    text = completion_text(completion)
    if any(text.count(tag) != 1 for tag in _TAG.findall(form.pattern)):
        return False
    match = form.fullmatch(text)
    parts = () if match is None else match.groups()
    return bool(parts) and all(any(map(str.isalnum, part.translate(_WITHOUT_FILLERS))) for part in parts)


@registries.rewards.register("tag_count", "tag_count_reward")
def tag_count_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return 0.25 for each of the four tags that occurs exactly once on its own line, as in open-r1.

    A line feed must follow `<think>`, precede `</answer>`, and surround the two tags between them.

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.

    Raises:
        RewardError: a completion is not text.
    """
    return [sum(text.count(line) == 1 for line in _TAG_LINES) / 4 for text in map(completion_text, completions)]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """Reward returned by `get_soft_overlong_punishment`; a class, so that it can be pickled."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """Return the reward of each completion, in [-1, 0], from its token ids."""
        cache = self.soft_punish_cache
        overs = [len(ids) - (self.max_completion_len - cache) for ids in completion_ids]
        return [-1.0 if over > cache else -over / cache if over > 0 else 0.0 for over in overs]


@registries.rewards.register(
    "length", "soft_overlong", "soft_overlong_punishment_reward", "get_soft_overlong_punishment"
)
def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Return the soft overlong reward: 0 up to Lmax − c tokens, then falling to −1 at Lmax and beyond.

    Equation 13 of DAPO (https://huggingface.co/papers/2503.14476).

    Args:
        max_completion_len: Lmax, in tokens, at least 1.
        soft_punish_cache: c, in tokens, in [0, max_completion_len]; with 0 the reward is 0 up to Lmax and −1 beyond.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_value("max_completion_len", max_completion_len, int, ge=1)
    check_value("soft_punish_cache", soft_punish_cache, int, ge=0, le=max_completion_len)
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


GatherObjects = Callable[[list[Any]], list[Any]]
Reward = TypeVar("Reward", bound=Callable[..., Any])


def needs_whole_groups(*columns: str, optional: Sequence[str] = ()) -> Callable[[Reward], Reward]:
    """Return a decorator that marks a reward as needing all completions of a prompt at once.

    The marked function must be pure and take (completions, *columns, num_generations, **kwargs) of whole groups, in the
    order of the prompts. The trainer gathers its arguments over the processes and keeps the local slice of the result.

    Args:
        columns: required per-row columns besides `completions`; `completion_ids` is allowed, images are not.
        optional: columns that the reward uses if the data have them.
    """

    def mark(reward: Any) -> Any:
        reward.whole_group_columns = columns, tuple(optional)
        return reward

    return mark


def needed_columns(reward: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the required and optional columns of a reward marked by `needs_whole_groups`; None if it is not."""
    columns = getattr(reward, "whole_group_columns", getattr(unwrap_reward(reward), "whole_group_columns", None))
    return columns if isinstance(columns, tuple) else None  # some objects answer every attribute


def unwrap_reward(reward: Any) -> Any:
    """Return the function inside `functools.partial`."""
    while isinstance(reward, partial):
        reward = reward.func
    return reward


@dataclass(eq=False)
class WholeGroups:
    """Adapter that TRL calls with the rows of one process and that computes the reward on whole groups.

    Args:
        reward: a function marked by `needs_whole_groups`.
        gather: concatenates one list per process, in the order of the processes, on every process.
        process_index: index of this process.
        num_generations: completions per prompt, or a function that returns it at each call; None: the reward is called
            with an argument or column `num_generations`.
    """

    reward: Callable[..., Any]
    gather: GatherObjects
    process_index: int
    num_generations: int | Callable[[], int] | None = None

    def __post_init__(self) -> None:
        self.__name__ = str(getattr(self.reward, "__name__", None) or unwrap_reward(self.reward).__name__)
        self.required, self.optional = needed_columns(self.reward) or ((), ())

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Return the rewards of the local completions; every process gathers exactly once, also without rows."""
        inputs = {name: list(kwargs[name]) for name in (*self.required, *self.optional) if kwargs.get(name) is not None}
        parts = self.gather([(list(completions), inputs)])
        for process, (_, columns) in enumerate(parts):
            if missing := [name for name in self.required if name not in columns]:
                lacks = f"On process {process} {self.__name__} lacks the column {missing[0]!r}"
                raise RewardError(f"{lacks}: add it to the rows.")
        arguments: dict[str, Any] = {
            name: [value for rows, columns in parts for value in columns.get(name, [None] * len(rows))]
            for name in sorted({name for _, columns in parts for name in columns})
        }
        everything = [completion for rows, _ in parts for completion in rows]
        start = sum(len(rows) for rows, _ in parts[: self.process_index])
        here = slice(start, start + len(completions))
        arguments |= {name: kwargs[name] for name in ("trainer_state", "log_metric") if name in kwargs}
        if (log_extra := kwargs.get("log_extra")) is not None:
            arguments["log_extra"] = lambda column, values: log_extra(column, list(values)[here])
        size = kwargs.get("num_generations")
        if size is None:
            size = self.num_generations() if callable(self.num_generations) else self.num_generations
        size = group_size(len(everything), size)
        rewards = list(self.reward(completions=everything, num_generations=size, **arguments))
        if len(rewards) != len(everything):
            returned = f"{self.__name__} returned {len(rewards)} rewards for {len(everything)} completions"
            raise RewardError(f"{returned}: return one for each, None where it does not apply.")
        return rewards[here]


gather_groups = WholeGroups


def group_size(count: int, num_generations: Any) -> int:
    """Return the completions per prompt from an int or a column of equal ints.

    Args:
        count: completions, over all processes.
        num_generations: completions per prompt, passed by TRL or as a column of the data.

    Raises:
        RewardError: the completions are not whole groups.
    """
    sizes = {num_generations} if isinstance(num_generations, int | None) else {*num_generations}
    if not count and not sizes:
        return 1
    size = int(sizes.pop() or 0) if len(sizes) == 1 else 0
    if size < 1 or count % size:
        there = f"There are {count} completions over all processes with num_generations {num_generations}"
        raise RewardError(f"{there}: give the number of completions per prompt, which divides them.")
    return size


_MIN_SPREAD = 1e-5  # relative to Q3: equal completions differ by float32 rounding, 1e-7 to 1e-6


@registries.rewards.register("vgr", "vgr_reward")
@needs_whole_groups("vgr")
def vgr_reward(
    completions: Sequence[Any], vgr: Sequence[float | None], num_generations: int | Sequence[int], **kwargs: Any
) -> list[float | None]:
    """Return clip((Q3 - v) / (Q3 - Q1), 0, 1) for each completion: 1 for the most attention to the image.

    Q1 and Q3 are the quartiles (linear interpolation) of the finite VGR v of the group (`Rewards` in definitions.md).

    Example:
        >>> completions = ["red", "blue", "green", ""]  # a group, the last without a token
        >>> vgr_reward(completions, vgr=[0.5, 1.5, 2.5, None], num_generations=4)
        [1.0, 0.5, 0.0, None]

    Args:
        completions: N completions, the G of a prompt one after another.
        vgr: VGR of each, of the late segment of layers; None or NaN where undefined, inf where it never looked.
        num_generations: G.
        kwargs: further arguments of TRL.

    Returns:
        N rewards in [0, 1]: 0.5 where the group's values do not differ (Q3 - Q1 <= 1e-5 Q3) or fewer than 2 are finite,
        0 for inf, None where VGR is undefined.

    Raises:
        RewardError: the values are not whole groups.
    """
    return _map_groups(len(vgr), num_generations, lambda rows: _rank_group([vgr[row] for row in rows]))


@registries.rewards.register("vgr_hard_negative", "vgr_hard_negative_reward")
@needs_whole_groups("vgr", optional=("solution", "choices", "label_idx"))
def vgr_hard_negative_reward(
    completions: Sequence[Any],
    vgr: Sequence[float | None],
    solution: Sequence[Any] | None = None,
    num_generations: int | Sequence[int] = 1,
    **kwargs: Any,
) -> list[float | None]:
    """Return the VGR reward, computed among the right completions of a group, minus 0.5; 0 for wrong ones.

    Args:
        completions: N completions, the G of a prompt one after another.
        vgr: VGR of each; None or NaN where undefined.
        solution: see `accuracy_reward`, as for the columns `choices` and `label_idx`.
        num_generations: G.
        kwargs: further arguments of TRL.

    Returns:
        N rewards in [-0.5, 0.5]: 0 in a group with fewer than 2 right completions; None where a right completion has no
        VGR, or where accuracy is None.

    Raises:
        RewardError: the values are not whole groups.
    """
    return compute_hard_negative_rewards(accuracy_reward(completions, solution, **kwargs), vgr, num_generations)


def compute_hard_negative_rewards(
    accuracy: Sequence[float | None], vgr: Sequence[float | None], num_generations: int | Sequence[int]
) -> list[float | None]:
    """Compute `vgr_hard_negative_reward` from given accuracies.

    Args:
        accuracy: 1 for a right completion, 0 for a wrong one, None for one that cannot be graded.
        vgr: VGR of each; None or NaN where undefined.
        num_generations: G.

    Raises:
        RewardError: the values are not whole groups.
    """

    def score_group(rows: range) -> list[float | None]:
        right = [row for row in rows if accuracy[row] == 1]
        ranks = dict(zip(right, _rank_group([vgr[row] for row in right]), strict=True))
        ranked = (ranks.get(row, None if accuracy[row] is None else 0.5) for row in rows)
        return [None if rank is None else (rank - 0.5) * (len(right) > 1) for rank in ranked]

    return _map_groups(len(vgr), num_generations, score_group)


@registries.rewards.register("mdi", "mdi_reward")
def mdi_reward(
    completions: Sequence[Any],
    vgr: Sequence[float | None],
    mdi_balance_ratio: float | Sequence[float] = 2.0,
    **kwargs: Any,
) -> list[float | None]:
    """Return 2 · balance - 1 with balance = clip(1 - |ln VGR| / ln R, 0, 1): 1 for balanced attention.

    Args:
        completions: N completions.
        vgr: VGR of each; None or NaN where undefined.
        mdi_balance_ratio: R, above 1; one for all, or one per completion.
        kwargs: further arguments of TRL.

    Returns:
        N rewards in [-1, 1]; None where VGR is undefined.

    Raises:
        RewardError: R is not above 1.
    """
    ratios = [mdi_balance_ratio] * len(vgr) if isinstance(mdi_balance_ratio, int | float) else mdi_balance_ratio
    if not all(math.isfinite(ratio) and ratio > 1 for ratio in ratios):
        raise RewardError(f"mdi_balance_ratio is {mdi_balance_ratio}: give a number above 1.")
    return [_balance(v, ratio) for v, ratio in zip(vgr, ratios, strict=True)]


def _balance(vgr: float | None, ratio: float) -> float | None:
    if vgr is None or math.isnan(vgr):
        return None
    distance = abs(math.log(vgr)) if vgr > 0 else math.inf
    return 2 * min(max(1 - distance / math.log(ratio), 0.0), 1.0) - 1


@registries.rewards.register("region", "region_reward")
@declares(needs=("region_share",))
def region_reward(completions: Sequence[Any], region_share: list[float | None], **kwargs: Any) -> list[float | None]:
    """Return the share of each completion's image attention that falls into the boxes of its row, in [0, 1].

    Args:
        completions: N completions.
        region_share: the signal of this name, averaged over tokens; None if the row has no boxes.
        kwargs: further arguments of TRL.
    """
    return region_share


def _map_groups(
    count: int, num_generations: int | Sequence[int], score_group: Callable[[range], list[float | None]]
) -> list[float | None]:
    size = group_size(count, num_generations)
    return [reward for start in range(0, count, size) for reward in score_group(range(start, start + size))]


def _rank_group(group: Sequence[float | None]) -> list[float | None]:
    finite = [value for value in group if value is not None and math.isfinite(value)]
    first, third = 0.0, 0.0
    if len(finite) > 1:
        first, _, third = statistics.quantiles(finite, n=4, method="inclusive")

    def rank(value: float | None) -> float | None:
        if value is None or math.isnan(value):
            return None
        if math.isinf(value):
            return 0.0
        if third - first <= _MIN_SPREAD * third:
            return 0.5
        return min(max((third - value) / (third - first), 0.0), 1.0)

    return [rank(value) for value in group]


ATTENTION_REWARDS: dict[Any, float] = {vgr_reward: 0.5, vgr_hard_negative_reward: 0.0, mdi_reward: 0.0}


def scale_by_accuracy(rewards: Iterable[Any]) -> list[Any]:
    """Scale attention rewards towards their middle if accuracy varies little within a group.

    A reward v becomes m + 2·s·(v - m), with m the middle of its range (0.5 for VGR, else 0) and s the standard
    deviation (over G) of the group's accuracy: 2·s is 1 if half of the completions are right, 0 if all or none are.
    Completions without accuracy do not count; if no accuracy is known, the reward is None.

    Args:
        rewards: reward functions; all but attention rewards are returned unchanged.

    Raises:
        RewardError: when called, if the rows have no answers.
    """
    return [_scale_reward(reward) if reward in [*ATTENTION_REWARDS] else reward for reward in rewards]


def _scale_reward(reward: Any) -> Any:
    middle = ATTENTION_REWARDS[reward]

    @needs_whole_groups("vgr", optional=("solution", "choices", "label_idx", "mdi_balance_ratio"))
    @wraps(reward)
    def scaled(completions: Sequence[Any], num_generations: int | Sequence[int], **kwargs: Any) -> list[float | None]:
        if kwargs.get("solution") is None and kwargs.get("label_idx") is None:
            lacks = f"the rows of {reward.__name__} have no column solution"
            raise RewardError(f"attention_reward_scale is accuracy, but {lacks}: add it, or set the option to none.")
        rewards = reward(completions, num_generations=num_generations, **kwargs)
        accuracy = accuracy_reward(completions, **kwargs)

        def score_group(rows: range) -> list[float | None]:
            defined = [value for row in rows if (value := accuracy[row]) is not None]
            if not defined:
                return [None] * len(rows)
            scale = 2 * statistics.pstdev(defined)
            return [None if rewards[row] is None else middle + scale * (rewards[row] - middle) for row in rows]

        return _map_groups(len(rewards), num_generations, score_group)

    return scaled
