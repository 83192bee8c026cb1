"""Supervised steps that bring a random model to where reinforcement finds something to reward.

First without images: from the words of a thought to the answer. Then with images: the words of the thought.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.demo.tiny_processor import EOS

Row = Mapping[str, Any]


def target_text(row: Row) -> str:
    """Return what the model is to write for `row`, which has a `thought` and, unless it is a caption, a `solution`."""
    if row.get("solution") is None:
        return f"<think>{row['thought']}</think>"
    return f"<think>{row['thought']}</think><answer>{row['solution']}</answer>{EOS}"


def encode(processor: Any, rows: Sequence[Row], *, images: bool) -> tuple[Any, torch.Tensor]:
    """Return the model's inputs for prompts with their targets, and the length of each row's target, (N,)."""
    texts, pictures = [], []
    for row in rows:
        prompt = build_prompt(row["problem"], row.get("choices"), system_prompt=None)
        if images:
            prompt = prepare_multimodal_messages(prompt, images=[row["image"]])
            pictures.append([row["image"]])
        texts.append(processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    targets = [target_text(row) for row in rows]
    inputs = processor(
        text=[text + target for text, target in zip(texts, targets, strict=True)],
        images=pictures or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    return inputs, torch.tensor([len(ids) for ids in processor.tokenizer(targets)["input_ids"]])


def supervised_loss(
    model: Any, processor: Any, rows: Sequence[Row], *, images: bool, thought_weight: float = 1.0
) -> tuple[torch.Tensor, float]:
    """Return the mean loss over target tokens, and that over answer tokens alone.

    Args:
        rows: with problem, choices (or None), thought, solution, and image if `images`.
        images: whether the model sees the images.
        thought_weight: weight of the tokens that are not the answer; theirs and the answer's mean are added.
    """
    inputs, lengths = encode(processor, rows, images=images)
    longest = int(lengths.max())
    logits = model(**inputs.to(model.device), logits_to_keep=longest + 1).logits[:, :-1].float()  # (N, T, vocabulary)
    labels = inputs["input_ids"][:, -longest:]  # (N, T), targets end at the right
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # (N, T)
    is_target = torch.arange(longest) >= longest - lengths[:, None]
    is_answer = _is_answer(processor, labels) & is_target
    rest = losses[is_target & ~is_answer].mean()
    if not is_answer.any():
        return rest, rest.item()
    answer = losses[is_answer].mean()
    return answer + thought_weight * rest, answer.item()


def learn_answers(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    *,
    max_steps: int = 1500,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    target_loss: float = 0.08,
    seed: int = 0,
) -> int:
    """Teach, without images, to go from the words of a thought to the answer; return the number of steps.

    Stops when a moving average of the answer's loss is below `target_loss`, in nats.
    """
    return _until(
        target_loss,
        lambda batch: supervised_loss(model, processor, batch, images=False, thought_weight=0.2),
        _steps(model, rows, max_steps, batch_size, learning_rate, seed, "warm start (text)"),
    )


def learn_captions(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    *,
    max_steps: int = 600,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    target_loss: float = 0.7,
    seed: int = 0,
) -> int:
    """Teach to write the thought for an image, without a question; return the number of steps.

    Stops when a moving average of the loss is below `target_loss`, in nats.
    """
    captions = [{"problem": "", "image": row["image"], "thought": row["thought"]} for row in rows]
    return _until(
        target_loss,
        lambda batch: supervised_loss(model, processor, batch, images=True),
        _steps(model, captions, max_steps, batch_size, learning_rate, seed, "warm start (captions)"),
    )


def _until(target_loss: float, losses: Callable[[Any], tuple[torch.Tensor, float]], steps: Any) -> int:
    average, taken = 3.0, 0
    for batch, update, bar in steps:
        loss, watched = losses(batch)
        update(loss)
        average = 0.95 * average + 0.05 * watched
        bar.set_postfix(loss=f"{average:.3f}", refresh=False)
        taken += 1
        if average < target_loss:
            break
    return taken


def warm_start(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    *,
    accuracy: Callable[[], float],
    target_accuracy: float = 0.55,
    measure_every: int = 10,
    max_steps: int = 600,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> list[tuple[int, float]]:
    """Teach to read the words of the thought off the image; return the measured (step, accuracy) pairs.

    Args:
        model: a Qwen2.5-VL model, best after `learn_answers` and `learn_captions`.
        rows: with image, problem, choices (or None), thought and solution.
        accuracy: measures the model on questions that are not used for anything else.
        target_accuracy: stop here, so that something is left to reinforce; in [0, 1].
        measure_every: steps between measurements, at least 1.
        max_steps: stop here at the latest.
    """
    history: list[tuple[int, float]] = []
    steps = _steps(model, rows, max_steps, batch_size, learning_rate, seed, "warm start (images)")
    for step, (batch, update, bar) in enumerate(steps, 1):
        update(supervised_loss(model, processor, batch, images=True)[0])
        if step % measure_every == 0 or step == max_steps:
            history.append((step, accuracy()))
            bar.set_postfix(accuracy=f"{history[-1][1]:.2f}", refresh=False)
            if history[-1][1] >= target_accuracy:
                break
    return history


def _is_answer(processor: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return which tokens stand between <answer> and </answer>, (N, T)."""
    opening, closing = processor.tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
    opened = (labels == opening).cumsum(1) > 0
    closed = (labels == closing).cumsum(1) > 0
    inside: torch.Tensor = opened & ~closed & (labels != opening)
    return inside


def _steps(
    model: Any, rows: Sequence[Any], max_steps: int, batch_size: int, learning_rate: float, seed: int, name: str
) -> Iterator[tuple[list[Any], Callable[[torch.Tensor], None], Any]]:
    """Yield up to `max_steps` times a batch, a function that steps down its loss, and the progress bar."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()

    with _training(model), tqdm(total=max_steps, desc=name) as bar:
        for _ in range(max_steps):
            model.train()
            yield rng.sample(rows, batch_size), update, bar
            bar.update()


@contextmanager
def _training(model: Any) -> Iterator[None]:
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
