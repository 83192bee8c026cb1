"""Accuracy of a model on questions, without training."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.prompts import build_prompt
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards import accuracy_reward, think_format_reward


@dataclass(frozen=True)
class Scores:
    """What was measured on a set of questions; rates lie in [0, 1].

    `accuracy` is that of the greedy completion, `mean_at_k` the mean over the k sampled completions, `pass_at_k` the
    share of questions with at least one right among them (all NaN-free; `mean_at_k` and `pass_at_k` are None for k=0).
    """

    questions: int
    k: int
    accuracy: float
    mean_at_k: float | None
    pass_at_k: float | None
    format: float
    format_sampled: float | None


@dataclass(frozen=True)
class Evaluation(Scores):
    """Scores of all questions, of each group of them, and what the model wrote."""

    skipped: int = 0
    groups: dict[str, Scores] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def to_dict(self, records: bool = False) -> dict[str, Any]:
        """Return the numbers as plain Python values; with `records` also every completion."""
        values = asdict(self)
        if not records:
            del values["records"]
        return values


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
    group_by: str | None = None,
    system_prompt: str | None = None,
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
        max_completion_length: in tokens.
        batch_size: questions per generation call.
        blank_images: replace each image by mid-grey of the same size, to see what is answered without looking.
        group_by: a column; scores are also given for each of its values.
        system_prompt: put before rows that have a `problem` and no `prompt`.
        seed: of sampling.

    Raises:
        ConfigError: an option is out of range.
        DataError: there is no row, no row with a usable solution, or no image to blank.
    """
    _check_options(num_samples, temperature, max_completion_length, batch_size)
    if len(rows) == 0:
        raise DataError("evaluate got no rows: give at least one question.")
    records: list[dict[str, Any]] = []
    with _inference(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        batches = range(0, len(rows), batch_size)
        for start in tqdm(
            batches, desc="evaluate (blank images)" if blank_images else "evaluate", disable=not progress
        ):
            batch = [dict(rows[i]) for i in range(start, min(start + batch_size, len(rows)))]
            records += _answer(model, processor, batch, num_samples, temperature, max_completion_length, blank_images,
                               system_prompt)  # fmt: skip
    if blank_images and not any(record["has_image"] for record in records):
        raise DataError("blank_images=True needs images, but no row has an `image` or `images`.")
    scored = [record for record in records if record["correct"] is not None]
    if not scored:
        raise DataError(
            f"None of the {len(records)} rows has a usable solution: give each a `solution` (letter, index or text)."
        )
    groups = defaultdict(list)
    if group_by is not None:
        for record in scored:
            groups[str(record["row"].get(group_by))].append(record)
    for record in records:
        row = record.pop("row")
        record |= {key: row[key] for key in ("id", "source", "problem", "solution") if key in row}
    return Evaluation(
        **asdict(_scores(scored)),
        skipped=len(records) - len(scored),
        groups={name: _scores(members) for name, members in sorted(groups.items())},
        records=records,
    )


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


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _images_of(row: Mapping[str, Any]) -> list[Image.Image]:
    if row.get("images") is not None:
        return list(row["images"])
    return [row["image"]] if row.get("image") is not None else []


def blank_image(image: Image.Image) -> Image.Image:
    """Return a mid-grey RGB image of the same size."""
    return Image.new("RGB", image.size, (128, 128, 128))


def _conversation(row: Mapping[str, Any], images: list[Image.Image], system_prompt: str | None) -> Any:
    prompt = row.get("prompt")
    if prompt is None:
        prompt = build_prompt(row["problem"], row.get("choices"), system_prompt=system_prompt)
    return prepare_multimodal_messages(prompt, images=images) if images else prompt


def _answer(
    model: Any,
    processor: Any,
    batch: list[dict[str, Any]],
    num_samples: int,
    temperature: float,
    max_completion_length: int,
    blank_images: bool,
    system_prompt: str | None,
) -> list[dict[str, Any]]:
    images = [_images_of(row) for row in batch]
    if blank_images:
        images = [[blank_image(image) for image in row_images] for row_images in images]
    conversations = [_conversation(row, imgs, system_prompt) for row, imgs in zip(batch, images, strict=True)]
    inputs = _tokenize(processor, conversations).to(model.device)

    def write(**sampling: Any) -> list[str]:
        tokenizer = getattr(processor, "tokenizer", processor)
        ids = model.generate(
            **inputs,
            max_new_tokens=max_completion_length,
            eos_token_id=_stop_ids(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            repetition_penalty=1.0,
            top_p=1.0,
            **sampling,
        )
        return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    greedy = write(do_sample=False, temperature=1.0, top_k=50)
    sampled = (
        write(do_sample=True, temperature=temperature, top_k=0, num_return_sequences=num_samples) if num_samples else []
    )
    return [
        _judge(row, greedy[i], sampled[i * num_samples : (i + 1) * num_samples], bool(images[i]))
        for i, row in enumerate(batch)
    ]


def _tokenize(processor: Any, conversations: list[Any]) -> Any:
    options: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    if isinstance(conversations[0], str):
        return processor(text=conversations, **options)
    if hasattr(processor, "tokenizer"):
        conversations = [prepare_multimodal_messages(conversation) for conversation in conversations]
    return processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    declared = model.generation_config.eos_token_id
    declared = [declared] if isinstance(declared, int) else list(declared or [])
    return sorted({*declared, tokenizer.eos_token_id})


def _judge(row: dict[str, Any], greedy: str, sampled: list[str], has_image: bool) -> dict[str, Any]:
    completions = [greedy, *sampled]
    columns = {key: [row.get(key)] * len(completions) for key in ("solution", "choices", "label_idx") if key in row}
    correct = accuracy_reward(completions, **columns)
    well_formed = think_format_reward(completions)
    return {
        "row": row,
        "has_image": has_image,
        "greedy": greedy,
        "sampled": sampled,
        "correct": None if correct[0] is None else correct[0],
        "correct_sampled": correct[1:],
        "format": well_formed[0],
        "format_sampled": well_formed[1:],
    }


def _scores(records: list[dict[str, Any]]) -> Scores:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    k = len(records[0]["sampled"])
    return Scores(
        questions=len(records),
        k=k,
        accuracy=mean([record["correct"] for record in records]),
        mean_at_k=mean([mean(record["correct_sampled"]) for record in records]) if k else None,
        pass_at_k=mean([max(record["correct_sampled"]) for record in records]) if k else None,
        format=mean([record["format"] for record in records]),
        format_sampled=mean([mean(record["format_sampled"]) for record in records]) if k else None,
    )
