"""What the right answer of a row is: a letter, an index, the text of an option, or an open answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.answers.letters import LETTERS, read_labelled, read_letter
from vgr_trl.rewards.answers.stated import answer_tag
from vgr_trl.rewards.answers.text import half_width, normalise, shown

FEWEST_CHOICES, MOST_CHOICES = 2, len(LETTERS)
LARGEST_INTEGER = 10**18


@dataclass(frozen=True)
class Solution:
    """The right answer of a row.

    `text` is the right option's text, or the open answer; `choices` are the options if they are known, and `index` is
    the 0-based position of the right one, or of the letter that the answer is (None for any other open answer).
    """

    text: str
    choices: tuple[str, ...] = ()
    index: int | None = None


def resolve_solution(solution: Any, choices: Any = None, label_idx: Any = None) -> Solution:
    """Return which answer a row calls right (`Stated answer` in definitions.md).

    Args:
        solution: letter A–J, option text or 0-based index; without `choices` a letter, also as `(B)` or `B) blue`, or
            the open answer, text or number. An `<answer>` tag around it is taken off. A string of digits is never an
            index.
        choices: texts of the 2 to 10 options in the order of their letters; None for an open question.
        label_idx: read where `solution` is None: as it, but a number is always a 0-based index.

    Raises:
        RewardError: the solution is missing, is none of the choices, or could mean two of them; or the choices are not
            2 to 10 texts that differ.
    """
    options = _options(choices)
    if (
        solution is None
        and not options
        and isinstance(label_idx, Real)
        and not (_is_bool(label_idx) or _is_missing(label_idx))
    ):
        return _letter_at(label_idx)
    solution = label_idx if solution is None else solution
    if _is_missing(solution):
        raise RewardError(f"solution is {solution!r}: give the right answer as {_accepted(options)}")
    if isinstance(solution, Integral) and abs(int(solution)) >= LARGEST_INTEGER:
        raise RewardError("solution is an integer of more than 18 digits: give it as a text")
    if not isinstance(solution, str | Real) or _is_bool(solution):
        raise RewardError(f"solution is {shown(solution)} ({type(solution).__name__}): give {_accepted(options)}")
    if not options and isinstance(solution, float) and math.isinf(solution):
        raise RewardError(f"solution is {solution}: give a finite number, or a text")
    if not options and isinstance(solution, str):
        return _of_text(_without_tag(solution))
    if not options:
        return Solution(_number_text(solution))
    if isinstance(solution, str):
        index = _index_of_text(_without_tag(solution), options)
    else:
        index = _index_of_number(solution, options)
    return Solution(options[index], options, index)


def _letter_at(label_idx: Any) -> Solution:
    if label_idx not in range(MOST_CHOICES):
        raise RewardError(f"label_idx is {shown(label_idx)}: without choices give an index 0 to {MOST_CHOICES - 1}")
    return Solution(LETTERS[int(label_idx)], index=int(label_idx))


def _of_text(solution: str) -> Solution:
    letter = read_letter(solution) or read_labelled(solution)
    return Solution(solution) if letter is None or letter not in LETTERS else _letter_at(LETTERS.index(letter))


def _options(choices: Any) -> tuple[str, ...]:
    if choices is None:
        return ()
    if hasattr(choices, "tolist"):
        choices = choices.tolist()
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise RewardError(f"choices is {shown(choices)} ({type(choices).__name__}): give a list of option texts")
    if not FEWEST_CHOICES <= len(choices) <= MOST_CHOICES:
        raise RewardError(
            f"choices has {len(choices)} options: give {FEWEST_CHOICES} to {MOST_CHOICES}, or None for an open question"
        )
    texts = [_number_text(choice) if isinstance(choice, Real) else choice for choice in choices]
    for position, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise RewardError(f"option {LETTERS[position]} of choices is {text!r}: give every option a text")
    folded = [" ".join(text.casefold().split()) for text in texts]
    for position, text in enumerate(folded):
        if (first := folded.index(text)) != position:
            raise RewardError(
                f"options {LETTERS[first]} and {LETTERS[position]} of choices are both {shown(texts[first])} "
                "(case and white space aside): give options that differ"
            )
    return tuple(texts)


def _index_of_text(solution: str, options: tuple[str, ...]) -> int:
    letter = read_letter(solution, options)
    by_letter = None if letter is None else LETTERS.find(letter)
    exact = [index for index, option in enumerate(options) if _plain(option) == _plain(solution)]
    if by_letter is not None and 0 <= by_letter < len(options):
        if other := [index for index in exact if index != by_letter]:
            raise _ambiguous(solution, [by_letter, *other], options)
        return by_letter
    matches = exact or [index for index, option in enumerate(options) if normalise(option) == normalise(solution)]
    if len(matches) > 1:
        raise _ambiguous(solution, matches, options)
    if matches:
        return matches[0]
    if letter is not None:
        raise RewardError(
            f"solution is the letter {letter}, but there are {len(options)} choices: give {_accepted(options)}"
        )
    raise RewardError(f"solution is {shown(solution)}, which is none of the choices: give {_accepted(options)}")


def _index_of_number(solution: Any, options: tuple[str, ...]) -> int:
    if not float(solution).is_integer():
        return _index_of_text(_number_text(solution), options)
    if not 0 <= solution < len(options):
        raise RewardError(
            f"solution is the index {int(solution)}, but there are {len(options)} choices: give {_accepted(options)}"
        )
    return int(solution)


def _accepted(options: tuple[str, ...]) -> str:
    if not options:
        return "a text or a number, or add choices"
    last = len(options) - 1
    return f"a letter A to {LETTERS[last]}, an integer index 0 to {last}, or the text of one option"


def _ambiguous(solution: str, indices: list[int], options: tuple[str, ...]) -> RewardError:
    meanings = " or ".join(f"{LETTERS[index]} ({shown(options[index])})" for index in indices)
    return RewardError(
        f"solution is {shown(solution)}, which could mean option {meanings}: give the index of the right option"
    )


def _is_missing(solution: Any) -> bool:
    if isinstance(solution, str):
        return not _without_tag(solution)
    return solution is None or (isinstance(solution, Real) and solution != solution)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _without_tag(solution: str) -> str:
    content = answer_tag(solution)
    return (solution if content is None else content).strip()


def _number_text(value: Any) -> str:
    if _is_bool(value) or (not isinstance(value, Integral) and not float(value).is_integer()):
        return str(value)
    return str(int(value)) if abs(value) < LARGEST_INTEGER else str(value)


def _plain(text: str) -> str:
    return half_width(text).strip()
