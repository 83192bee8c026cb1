"""Options in another order, such that the right letter says nothing."""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vgr_trl.data.rows.questions import Candidate, Question
from vgr_trl.data.rows.text.prompts import LETTERS

# Words that mean other options by their place or letter. Such options stay where they are, and so does a question that
# names options by letter.
_PLACES = re.compile(r"\b(above|below|preceding|previous|following|former|latter|first|second|last)\b", re.IGNORECASE)
_LETTERS = re.compile(
    r"^\W*[A-J]\W*$"
    r"|\b[A-J]\)?\s*(?:,|&|/|and|or|nor)\s*\(?[A-J]\b"
    r"|\b(?:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-J]\b"
)
_OPTION_LETTER = re.compile(r"\b(?:options?|choices?|answers?)\s+\(?[A-J]\b")


class ChoiceShuffler:
    """Shuffles the options of question after question; right letters come equally often.

    Among the questions with n options, every n in a row have each letter once as the right one.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"choices {seed}")
        self._letters: dict[int, list[int]] = {}

    def __call__(self, question: Question) -> Question:
        """Return `question` with its options in another order, or as it is where that would change its meaning."""
        choices = question.choices
        if not choices or stays_in_order(question):
            return question
        right = choices[LETTERS.index(question.solution)]
        others = [choice for index, choice in enumerate(choices) if index != LETTERS.index(question.solution)]
        self._random.shuffle(others)
        place = self._next_place(len(choices))
        return replace(question, choices=[*others[:place], right, *others[place:]], solution=LETTERS[place])

    def _next_place(self, count: int) -> int:
        waiting = self._letters.setdefault(count, [])
        if not waiting:
            waiting.extend(range(count))
            self._random.shuffle(waiting)
        return waiting.pop()


def shuffle_choices(candidates: Iterable[Candidate], seed: int) -> Iterator[Candidate]:
    """Yield the candidates with the options of their questions in another order; see `ChoiceShuffler`."""
    shuffler = ChoiceShuffler(seed)
    for origin, candidate in candidates:
        yield origin, candidate if isinstance(candidate, str) else shuffler(candidate)


def stays_in_order(question: Question) -> bool:
    """Return whether the question or one of its options refers to options by their place or letter."""
    choices = question.choices or []
    return bool(_OPTION_LETTER.search(question.problem)) or any(
        _PLACES.search(choice) or _LETTERS.search(choice) for choice in choices
    )
