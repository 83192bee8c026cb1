"""Answer questions from a description instead of the image, for rewards."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from vgr_trl.data.prompts import format_question, texts_of
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rollout import ConstructedTrainer, Rollout


def blind_answers(
    trainer: ConstructedTrainer, rollout: Rollout, completion_ids: list[list[int]]
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return one more answer per completion as a column for rewards, None without a description, and metrics.

    All of a process are generated at once, one for each completion, as its own completions are; they are not trained
    on, and not counted among the tokens of the run.
    """
    args, accelerator = trainer.args, trainer.accelerator
    texts = trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    described = [extract_description(text, args.blind_tag, args.blind_without_tag == "completion") for text in texts]
    conversations = [
        blind_conversation(args.blind_prompt, question_of(row), found or "")
        for row, found in zip(rollout.rows, described, strict=True)
    ]
    given = trainer.answer(rollout.rows, conversations)
    answers = [None if found is None else answer for found, answer in zip(described, given, strict=True)]
    share = torch.tensor([answer is not None for answer in answers], device=accelerator.device)
    described_share = accelerator.gather(share).float().mean().item()
    return {BLIND_ANSWERS: answers}, {"blind/described": described_share}


def extract_description(text: str, tag: str, or_all: bool) -> str | None:
    """Return what stands between the first tags of that name, stripped; None, or all of the text, without any."""
    _, opened, rest = text.partition(f"<{tag}>")
    description, closed, _ = rest.partition(f"</{tag}>")
    if opened and closed:
        return description.strip()
    return text if or_all else None


def question_of(row: Mapping[str, Any]) -> str:
    """Return what a row asks, with its options, without marks of images.

    That is its column `problem` if it has one, else the text of the last message of its prompt.
    """
    problem = row.get("problem")
    if isinstance(problem, str):
        text = format_question(problem, row.get("choices"))
    else:
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else "\n".join(texts_of(prompt[-1:]))
    return text.replace("<image>", "").strip()


def blind_conversation(template: str, question: str, description: str) -> list[dict[str, str]]:
    """Return the conversation that asks a question about a description."""
    parts = re.split(r"(\{description\}|\{question\})", template)
    known = {"{description}": description, "{question}": question}
    return [{"role": "user", "content": "".join(known.get(part, part) for part in parts)}]
