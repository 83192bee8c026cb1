"""`evaluate`: one greedy and k sampled completions per question, scored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.text.prompts import SYSTEM_PROMPT
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.evaluation.asking import conversation_of
from vgr_trl.evaluation.judging import correct_of, judged, rewards_of, solution_of
from vgr_trl.evaluation.scores import Evaluation, evaluation_of
from vgr_trl.evaluation.writer import Writer
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

    Raises:
        ConfigError: an option is out of range, or `group_by` is no column.
        DataError: there is no row, no row with a usable solution, or no image to blank.
    """
    _check_options(num_samples, temperature, max_completion_length, batch_size)
    _check_rows(rows, blank_images, group_by)
    for function in reward_funcs:
        check_callable(function, rows[0])
    writer = Writer(model, processor, max_completion_length)
    told = "evaluate (blank images)" if blank_images else "evaluate"
    records: list[dict[str, Any]] = []
    with _inference(model, seed):
        for start in tqdm(range(0, len(rows), batch_size), desc=told, disable=not progress):
            batch = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
            inputs = writer.prompt([conversation_of(row, blank_images, system_prompt) for row in batch])
            greedy, sampled = writer.greedy(inputs), writer.sample(inputs, num_samples, temperature)
            judgements = [judged(*each) for each in zip(batch, greedy, sampled, strict=True)]
            if blind and not blank_images and any(images_of(row) for row in batch):
                unseen = writer.greedy(writer.prompt([conversation_of(row, True, system_prompt) for row in batch]))
                for record, row, text in zip(judgements, batch, unseen, strict=True):
                    record["correct_blind"] = correct_of(row, [text])[0]
            records += judgements
    greedy = [record["greedy"] for record in records]
    for name, values in rewards_of(reward_funcs, rows, greedy, writer.tokenizer).items():
        for record, value in zip(records, values, strict=True):
            record.setdefault("rewards", {})[name] = value
    return evaluation_of(records, None if group_by is None else [str(row[group_by]) for row in rows])


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
    if not any(solution_of(row) is not None for row in rows):
        raise DataError(
            f"None of the {len(rows)} rows has a usable solution: give each a `solution` (letter, index or text)."
        )


@contextmanager
def _inference(model: Any, seed: int) -> Iterator[None]:
    """Nothing is trained, and the random state is what it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        model.train(was_training)
