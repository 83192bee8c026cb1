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
    """Answer questions from the descriptions in completions; return the reward column and metrics.

    A completion without a description gets None. One generation gives an answer for every completion of this process;
    answers are neither trained on nor counted among the run's tokens.

    Args:
        trainer: generates the answers.
        rollout: rows of the data.
        completion_ids: tokens of each completion.
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
    """Return the text between the first pair of tags, stripped.

    Args:
        text: text of a completion.
        tag: name of the tags.
        or_all: return the whole text if there are no tags, instead of None.
    """
    _, opened, rest = text.partition(f"<{tag}>")
    description, closed, _ = rest.partition(f"</{tag}>")
    if opened and closed:
        return description.strip()
    return text if or_all else None


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question of a row with its options, without image placeholders.

    The question is the column `problem`, or else the text of the prompt's last message.
    """
    problem = row.get("problem")
    if isinstance(problem, str):
        text = format_question(problem, row.get("choices"))
    else:
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else "\n".join(texts_of(prompt[-1:]))
    return text.replace("<image>", "").strip()


def blind_conversation(template: str, question: str, description: str) -> list[dict[str, str]]:
    """Build the conversation that asks a question about a description.

    Args:
        template: text with `{description}` and `{question}`.
        question: replaces `{question}`.
        description: replaces `{description}`.
    """
    parts = re.split(r"(\{description\}|\{question\})", template)
    known = {"{description}": description, "{question}": question}
    return [{"role": "user", "content": "".join(known.get(part, part) for part in parts)}]
