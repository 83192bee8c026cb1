"""What the completions of a question are worth: right or wrong, well formed, and what further rewards give them."""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards import accuracy_reward, resolve_solution, think_format_reward
from vgr_trl.rewards.accuracy import states_answer
from vgr_trl.rewards.answers.solutions import Solution
from vgr_trl.rewards.answers.text import normalise


def judged(row: Mapping[str, Any], greedy: str, sampled: list[str]) -> dict[str, Any]:
    """Return the record of a question: what was written, and what each completion is worth."""
    completions = [greedy, *sampled]
    correct = correct_of(row, completions)
    solution = solution_of(row)
    well_formed = think_format_reward(completions)
    return {
        **{key: row[key] for key in ("id", "source", "problem", "solution") if key in row},
        "greedy": greedy,
        "sampled": sampled,
        "correct": correct[0],
        "parsed": solution is not None and states_answer(greedy, solution),
        "answer": None if solution is None else _answer(solution),
        "correct_sampled": correct[1:],
        "format": well_formed[0],
        "format_sampled": well_formed[1:],
    }


def correct_of(row: Mapping[str, Any], completions: list[str]) -> list[float | None]:
    """Return for each completion whether it is right, None without a usable solution."""
    columns = {key: [row[key]] * len(completions) for key in ("solution", "choices", "label_idx") if key in row}
    return accuracy_reward(completions, **columns)


def solution_of(row: Mapping[str, Any]) -> Solution | None:
    """Return what is right, None if the row does not say."""
    try:
        return resolve_solution(row.get("solution"), row.get("choices"), row.get("label_idx"))
    except RewardError:
        return None


def _answer(solution: Solution) -> tuple[str, Any]:
    """Kind and content of the right answer, as `majority` counts them."""
    return ("text", normalise(solution.text)) if solution.index is None else ("letter", solution.index)


def rewards_of(
    functions: Sequence[Any], rows: Sequence[Mapping[str, Any]], completions: list[str], tokenizer: Any
) -> dict[str, list[float | None]]:
    """Return what each function gives the greedy completions of all rows, by the names of the functions."""
    if not functions:
        return {}
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "image", "images")}
    columns["prompts"] = [row.get("prompt") for row in rows]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
    columns["completion_ids"] = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return {getattr(function, "__name__", type(function).__name__): list(function(**columns)) for function in functions}
