"""How a question is written down for the model."""

from collections.abc import Sequence
from typing import Any

from vgr_trl.errors import DataError

LETTERS = "ABCDEFGHIJ"

SYSTEM_PROMPT = (
    "Look at the image and reason about the question before you answer. Write your reasoning between <think> and "
    "</think>, then only the final answer between <answer> and </answer>. For a multiple-choice question the final "
    "answer is the letter of the right option."
)


def format_question(problem: str, choices: Sequence[str] | None = None) -> str:
    """Return the question with its options, if any, each on a line of its own behind its letter.

    Raises:
        DataError: there are more options than letters.
    """
    if not choices:
        return problem
    if len(choices) > len(LETTERS):
        raise DataError(f"A question has {len(choices)} choices: give at most {len(LETTERS)}.")
    return "\n".join([problem, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))])


def build_prompt(
    problem: str, choices: Sequence[str] | None = None, *, system_prompt: str | None = SYSTEM_PROMPT
) -> list[dict[str, Any]]:
    """Return the conversation that asks `problem`; images travel beside it in the column `image` or `images`."""
    question = [{"role": "user", "content": format_question(problem, choices)}]
    return [{"role": "system", "content": system_prompt}, *question] if system_prompt else question
