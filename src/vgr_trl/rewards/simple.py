"""Rewards computed from the text of a completion: accuracy, blind accuracy, format and length."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vgr_trl import registries
from vgr_trl.options import check_value
from vgr_trl.registries import BLIND_ANSWERS, declares
from vgr_trl.rewards.answers import completion_text, excerpt, is_right, resolve_solution
from vgr_trl.utils import RewardError


@registries.rewards.register("accuracy", "accuracy_reward", "mc_idx_reward")
def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1 for each completion that states the right answer, else 0 (`Stated answer` in definitions.md).

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
    given = {"solution": solution, "choices": choices, "label_idx": kwargs.get("label_idx")}
    columns = {name: [None] * len(completions) if values is None else values for name, values in given.items()}
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
        num_returned_images: of each, the images that tools have returned.
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
        num_tool_calls: of each of N completions, the calls that were answered.
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


_HANGUL_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters in Unicode, but invisible
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
    return match is not None and all(map(_has_content, match.groups()))


def _has_content(text: str) -> bool:
    return any(character.isalnum() and character not in _HANGUL_FILLERS for character in text)


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
