"""`evaluate`: one greedy and k sampled completions per question, scored."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.text.marks import placed
from vgr_trl.data.rows.text.prompts import SYSTEM_PROMPT, build_prompt
from vgr_trl.errors import ConfigError, DataError, RewardError
from vgr_trl.evaluation.generation import Writer
from vgr_trl.evaluation.scores import Evaluation, scores_of
from vgr_trl.rewards import accuracy_reward, resolve_solution, think_format_reward
from vgr_trl.rewards.accuracy import states_answer
from vgr_trl.rewards.answers.solutions import Solution
from vgr_trl.rewards.answers.text import normalise
from vgr_trl.rewards.signatures import check_callable


def evaluate(
    model: Any,
    processor: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    num_samples: int = 8,
    temperature: float = 1.0,
    max_completion_length: int = 512,
    batch_size: int = 16,
    blank_images: bool = False,
    blind: bool = False,
    reward_funcs: Sequence[Any] = (),
    group_by: str | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Generate one greedy and `num_samples` sampled completions per question and score them.

    Args:
        model: a transformers model that generates.
        processor: its processor, or its tokenizer for a text-only model.
        rows: questions with `prompt` (a conversation) or `problem` (text) and `choices`; `solution`; `image`/`images`.
        num_samples: k of mean@k and pass@k; 0 for greedy only.
        temperature: of sampling, > 0.
        max_completion_length: in tokens, at least 1.
        batch_size: questions per generation call, at least 1.
        blank_images: replace each image by mid-grey of the same size, to see what is answered without looking.
        blind: also answer each question greedily with such images, beside the true ones.
        reward_funcs: whose means over the greedy completions are given too; called with completions and columns.
        group_by: a column; scores are also given for each of its values.
        system_prompt: put before rows that have a `problem` and no `prompt`; None for none.
        seed: of sampling.

    Raises:
        ConfigError: an option is out of range, or `group_by` is no column.
        DataError: there is no row, no row with a usable solution, or no image to blank.
    """
    _check_options(num_samples, temperature, max_completion_length, batch_size)
    _check_rows(rows, blank_images, group_by)
    for function in reward_funcs:
        check_callable(function, rows[0])
    writer = Writer(model, processor, max_completion_length)
    records: list[dict[str, Any]] = []
    with _inference(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        starts = tqdm(
            range(0, len(rows), batch_size),
            desc="evaluate (blank images)" if blank_images else "evaluate",
            disable=not progress,
        )
        for start in starts:
            batch = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
            inputs = writer.prompt([_conversation(row, blank_images, system_prompt) for row in batch])
            greedy, sampled = writer.greedy(inputs), writer.sample(inputs, num_samples, temperature)
            judged = [_judged(*each) for each in zip(batch, greedy, sampled, strict=True)]
            if blind and not blank_images and any(images_of(row) for row in batch):
                unseen = writer.greedy(writer.prompt([_conversation(row, True, system_prompt) for row in batch]))
                for record, row, text in zip(judged, batch, unseen, strict=True):
                    record["correct_blind"] = _correct(row, [text])[0]
            records += judged
    for name, values in _rewards(
        reward_funcs, rows, [record["greedy"] for record in records], writer.tokenizer
    ).items():
        for record, value in zip(records, values, strict=True):
            record.setdefault("rewards", {})[name] = value
    scored = [record for record in records if record["correct"] is not None]
    groups = defaultdict(list)
    for record, row in zip(records, rows, strict=True):
        if group_by is not None and record["correct"] is not None:
            groups[str(row[group_by])].append(record)
    return Evaluation(
        **asdict(scores_of(scored)),
        skipped=len(records) - len(scored),
        groups={name: scores_of(members) for name, members in sorted(groups.items())},
        records=records,
    )


def blank_image(image: Image.Image) -> Image.Image:
    """Return a mid-grey RGB image of the same size."""
    return Image.new("RGB", image.size, (128, 128, 128))


def _check_options(num_samples: int, temperature: float, max_completion_length: int, batch_size: int) -> None:
    for name, value, minimum in (
        ("num_samples", num_samples, 0),
        ("max_completion_length", max_completion_length, 1),
        ("batch_size", batch_size, 1),
    ):
        if value < minimum:
            raise ConfigError(f"{name} is {value}: give an integer of at least {minimum}.")
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}: give a number above 0 (greedy answers are always measured).")


def _check_rows(rows: Sequence[Mapping[str, Any]], blank_images: bool, group_by: str | None) -> None:
    if len(rows) == 0:
        raise DataError("evaluate got no rows: give at least one question.")
    columns = list(rows[0])
    if group_by is not None and group_by not in columns:
        raise ConfigError(f"group_by is {group_by!r}: give one of the columns {', '.join(columns)}.")
    if blank_images and not any(images_of(row) for row in rows):
        raise DataError("blank_images=True needs images, but no row has an `image` or `images`.")
    if not any(_has_solution(row) for row in rows):
        raise DataError(
            f"None of the {len(rows)} rows has a usable solution: give each a `solution` (letter, index or text)."
        )


def _has_solution(row: Mapping[str, Any]) -> bool:
    return _solution(row) is not None


def _solution(row: Mapping[str, Any]) -> Solution | None:
    try:
        return resolve_solution(row.get("solution"), row.get("choices"), row.get("label_idx"))
    except RewardError:
        return None


def _answer(solution: Solution) -> tuple[str, Any]:
    """Kind and content of the right answer, as `majority` counts them."""
    return ("text", normalise(solution.text)) if solution.index is None else ("letter", solution.index)


def _correct(row: Mapping[str, Any], completions: list[str]) -> list[float | None]:
    columns = {key: [row[key]] * len(completions) for key in ("solution", "choices", "label_idx") if key in row}
    return accuracy_reward(completions, **columns)


def _rewards(
    functions: Sequence[Any], rows: Sequence[Mapping[str, Any]], completions: list[str], tokenizer: Any
) -> dict[str, list[float | None]]:
    """What each function gives the completions, by the names of the functions."""
    if not functions:
        return {}
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "image", "images")}
    columns["prompts"] = [row.get("prompt") for row in rows]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
    columns["completion_ids"] = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return {getattr(function, "__name__", type(function).__name__): list(function(**columns)) for function in functions}


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _conversation(row: Mapping[str, Any], blank_images: bool, system_prompt: str | None) -> Any:
    prompt = row.get("prompt") or build_prompt(row["problem"], row.get("choices"), system_prompt=system_prompt)
    images = images_of(row)
    if not images:
        return prompt
    if isinstance(prompt, str):
        raise DataError("A row with images has a text as its prompt: give a conversation (a list of messages).")
    return prepare_multimodal_messages(
        placed(prompt), images=[blank_image(i) for i in images] if blank_images else images
    )


def _judged(row: Mapping[str, Any], greedy: str, sampled: list[str]) -> dict[str, Any]:
    completions = [greedy, *sampled]
    correct = _correct(row, completions)
    solution = _solution(row)
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
