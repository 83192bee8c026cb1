"""Accuracy: 1 for a right answer, 0 for a wrong one; of a completion, or of what its description allows to answer."""

from collections.abc import Sequence
from typing import Any

from vgr_trl.registries import BLIND_ANSWERS, declares
from vgr_trl.rewards.answers import (
    LETTERS,
    Solution,
    answer_tag,
    completion_text,
    excerpt,
    last_statement,
    letter_in_parentheses,
    normalise,
    read_labelled,
    read_letter,
    resolve_solution,
    same_open_answer,
    strip_thought,
)
from vgr_trl.utils import RewardError


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1 for each completion whose stated answer is right, 0 for the others (`Stated answer` in definitions.md).

    Args:
        completions: N completions as TRL passes them, lists of messages or strings.
        solution: per completion the letter, 0-based index or text of the right option, or the open answer; where it is
            None the column `label_idx` is read instead, in which a number is always an index.
        choices: per completion the texts of 2 to 10 options, or None for an open question.
        kwargs: the other columns, of which `label_idx` is used, and what else TRL passes.

    Returns:
        N rewards; None where `solution` cannot be resolved, since such a row says nothing about its completion.

    Raises:
        RewardError: a column does not have one value per completion, or a completion is no text.
    """
    solutions = _column("solution", solution, len(completions))
    labels = _column("label_idx", kwargs.get("label_idx"), len(completions))
    options = _column("choices", choices, len(completions))
    rewards: list[float | None] = []
    for completion, stated, label, row_choices in zip(completions, solutions, labels, options, strict=True):
        text = completion_text(completion)
        try:
            right = resolve_solution(stated, row_choices, label)
        except RewardError:
            rewards.append(None)
        else:
            rewards.append(float(is_right(text, right)))
    return rewards


@declares(needs=(BLIND_ANSWERS,))
def blind_accuracy_reward(
    completions: Sequence[Any], blind_answers: Sequence[str | None], **kwargs: Any
) -> list[float | None]:
    """Return the accuracy of the answers given from each completion's description of the image alone, 0 or 1.

    Args:
        completions: N completions, of which nothing else counts.
        blind_answers: what was answered; None, which earns 0: the completion describes nothing.
        kwargs: the other columns, as `accuracy_reward` takes them.

    Returns:
        N rewards; None where the row does not say what is right.

    Raises:
        RewardError: as `accuracy_reward`.
    """
    return accuracy_reward([answer or "" for answer in blind_answers], **kwargs)


def _column(name: str, values: Any, count: int) -> Sequence[Any]:
    if values is None:
        return [None] * count
    if isinstance(values, str) or len(values) != count:
        raise RewardError(f"{name} is {excerpt(values)} for {count} completions: give a list with a value for each.")
    columns: Sequence[Any] = values
    return columns


def states_answer(text: str, solution: Solution) -> bool:
    """Return whether the completion `text` states any answer of the kind that `solution` is, right or wrong."""
    return _stated(text, solution) is not None


def is_right(text: str, solution: Solution) -> bool:
    """Return whether the completion `text` states `solution` as its answer."""
    stated = _stated(text, solution)
    if solution.choices:
        return stated == solution.index
    if solution.index is not None:
        return stated == LETTERS[solution.index]
    return isinstance(stated, str) and same_open_answer(solution.text, stated)


def _stated(text: str, solution: Solution) -> str | int | None:
    """What a completion states: an option, where there are choices, or a letter, or an open answer."""
    visible = strip_thought(text)
    if solution.choices:
        return chosen_option(visible, solution.choices)
    if solution.index is not None:
        return _stated_letter(visible, ())
    stated = answer_tag(visible)
    if stated is None and (statement := last_statement(visible, options=False)):
        stated = statement[0]
    return stated


def chosen_option(visible: str, choices: Sequence[str]) -> int | None:
    """Return the 0-based option that a completion chooses, None if it states none, or not exactly one.

    Args:
        visible: the completion without its thoughts.
        choices: texts of the options. A letter counts before the text of an option.
    """
    letter = _stated_letter(visible, choices)
    if letter is not None and (index := LETTERS.find(letter)) in range(len(choices)):
        return index
    stated = answer_tag(visible)
    if stated is None:
        return None
    matches = [index for index, choice in enumerate(choices) if normalise(choice) == normalise(stated)]
    return matches[0] if len(matches) == 1 else None


def _stated_letter(visible: str, choices: Sequence[str]) -> str | None:
    content, in_sentence = answer_tag(visible), False
    if content is None and (statement := last_statement(visible, options=True)) is not None:
        content, in_sentence = statement
    if content is None:
        return letter_in_parentheses(visible)
    return read_letter(content, choices, in_sentence=in_sentence) or (None if choices else read_labelled(content))
