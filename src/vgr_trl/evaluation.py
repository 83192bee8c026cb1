"""Evaluate a model on questions: generate completions, grade them, and compute scores."""

import asyncio
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from rich.console import Console
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers import GenerationConfig
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.batch import pad_rows
from vgr_trl.data.images import images_of
from vgr_trl.data.prompts import SYSTEM_PROMPT, build_prompt, placed
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.patching import evaluating, keep_random_state, patched_attribute
from vgr_trl.rewards.answers import decode_with_tags, states_answer, usable_solution
from vgr_trl.rewards.calling import check_callable, reward_name, wrap_reward
from vgr_trl.rewards.functions import accuracy_reward, think_format_reward
from vgr_trl.rewards.phrases import normalise
from vgr_trl.sharing.prefix_split import image_token_ids

__all__ = ["AnswerScores", "Evaluation", "blank_image", "evaluate", "print_scores"]


def blank_image(image: Image.Image) -> Image.Image:
    """Return a mid-grey RGB image of the same size."""
    return Image.new("RGB", image.size, (128, 128, 128))


def build_conversation(row: Mapping[str, Any], blank_images: bool, system_prompt: str | None) -> Any:
    """Return the prompt of a row, or build it from the question; a text prompt is returned unchanged.

    Args:
        row: row of the data.
        blank_images: replace images with mid-grey.
        system_prompt: system prompt of a conversation that is built from the question; None: none.

    Raises:
        DataError: a row with images has a text prompt.
    """
    prompt = row.get("prompt") or build_prompt(row["problem"], row.get("choices"), system_prompt=system_prompt)
    images = [blank_image(image) if blank_images else image for image in images_of(row)]
    if images and isinstance(prompt, str):
        raise DataError("A row with images has a text prompt: give a conversation (a list of messages).")
    return prepare_multimodal_messages(placed(prompt), images=images) if images else prompt


def grade(row: Mapping[str, Any], greedy: str, sampled: list[str]) -> dict[str, Any]:
    """Grade the completions of a question; return a record of completions, correctness and format.

    Args:
        row: row of the data.
        greedy: greedy completion.
        sampled: sampled completions.
    """
    completions = [greedy, *sampled]
    correct, well_formed = grade_completions(row, completions), think_format_reward(completions)
    solution = usable_solution(row)
    return {
        **{key: row[key] for key in ("id", "source", "problem", "solution") if key in row},
        "greedy": greedy,
        "sampled": sampled,
        "correct": correct[0],
        "parsed": solution is not None and states_answer(greedy, solution),
        "answer": solution and (normalise(solution.text) if solution.index is None else solution.index),
        "correct_sampled": correct[1:],
        "format": well_formed[0],
        "format_sampled": well_formed[1:],
    }


def grade_completions(row: Mapping[str, Any], completions: list[str]) -> list[float | None]:
    """Return the accuracy of each completion: 1, 0, or None without a usable solution."""
    columns = {key: [row[key]] * len(completions) for key in ("solution", "choices", "label_idx") if key in row}
    return accuracy_reward(completions, **columns)


def compute_rewards(
    functions: Sequence[Any], rows: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], tokenizer: Any
) -> dict[str, list[float | None]]:
    """Compute the rewards of the greedy completions of rows, by function name, with the arguments of training.

    Args:
        functions: reward functions.
        rows: rows of the data.
        records: records of `grade`, one per row.
        tokenizer: gives the tokens of the completions.
    """
    if not functions:
        return {}
    completions = [record["greedy"] for record in records]
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
    columns |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    columns["prompts"] = [row.get("prompt") for row in rows]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
    columns["completion_ids"] = tokenizer(completions, add_special_tokens=False)["input_ids"]
    rewards: dict[str, list[float | None]] = {}
    for function in functions:
        name = reward_name(function)
        values: Any = wrap_reward(function, name, _ignore)(**columns)
        rewards[name] = asyncio.run(values) if asyncio.iscoroutine(values) else values
    return rewards


def _ignore(*values: Any) -> None:
    """Log nothing."""


@dataclass(frozen=True)
class AnswerScores:
    """Scores on a set of questions; rates are in [0, 1].

    Attributes:
        questions: number of questions.
        k: sampled completions per question.
        accuracy, format: rates of the greedy completion.
        mean_at_k, format_sampled: means over the sampled completions; None for k = 0.
        pass_at_k: share of questions with a correct sampled completion; None for k = 0.
        interval: 95 % confidence interval of the accuracy (Wilson).
        unparsable: share of greedy completions that state no answer.
        majority: accuracy of always giving the most common letter or open answer.
        blind: accuracy with grey images; None if not measured.
        rewards: means of further reward functions over the greedy completions to which they apply.
    """

    questions: int
    k: int
    accuracy: float
    mean_at_k: float | None
    pass_at_k: float | None
    format: float
    format_sampled: float | None
    interval: tuple[float, float] = (0.0, 1.0)
    unparsable: float = 0.0
    majority: float = 0.0
    blind: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation(AnswerScores):
    """Scores over all questions and per group, the number of rows without a usable solution, and all completions."""

    skipped: int = 0
    groups: dict[str, AnswerScores] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def to_dict(self, records: bool = False) -> dict[str, Any]:
        """Return the scores as plain Python values; with `records` also the completions."""
        return {name: value for name, value in asdict(self).items() if records or name != "records"}


def build_evaluation(records: list[dict[str, Any]], groups: Sequence[str] | None = None) -> Evaluation:
    """Compute the scores of all records with a solution (at least one), and of each group.

    Args:
        records: records of `grade`.
        groups: group of each record; None: no groups.
    """
    scored = [record for record in records if record["correct"] is not None]
    members = defaultdict(list)
    for record, group in zip(records, groups or [], strict=groups is not None):
        if record["correct"] is not None:
            members[group].append(record)
    return Evaluation(
        **asdict(score_records(scored)),
        skipped=len(records) - len(scored),
        groups={name: score_records(of_group) for name, of_group in sorted(members.items())},
        records=records,
    )


def score_records(records: Sequence[dict[str, Any]]) -> AnswerScores:
    """Compute the scores of at least one record."""
    k = len(records[0]["correct_sampled"])
    right = sum(record["correct"] for record in records)
    columns = {name: [record["rewards"][name] for record in records] for name in records[0].get("rewards", {})}
    return AnswerScores(
        questions=len(records),
        k=k,
        accuracy=right / len(records),
        mean_at_k=fmean(fmean(record["correct_sampled"]) for record in records) if k else None,
        pass_at_k=fmean(max(record["correct_sampled"]) for record in records) if k else None,
        format=fmean(record["format"] for record in records),
        format_sampled=fmean(fmean(record["format_sampled"]) for record in records) if k else None,
        interval=wilson_interval(right, len(records)),
        unparsable=fmean(not record["parsed"] for record in records),
        majority=majority_accuracy([record["answer"] for record in records]),
        blind=_mean_known(record.get("correct_blind") for record in records),
        rewards={name: _mean_known(values) for name, values in columns.items()},
    )


def _mean_known(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def wilson_interval(right: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate (E. B. Wilson, 1927).

    Args:
        right: successes.
        count: trials.
        z: quantile of the normal distribution, for 95 % by default.
    """
    share, spread = right / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / count / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def majority_accuracy(answers: Sequence[int | str | None]) -> float:
    """Return the accuracy of always giving the most common letter, or for open questions the most common text.

    Args:
        answers: reference answers, letter indices or texts; None: unknown, counts as wrong.
    """
    best = (Counter(answer for answer in answers if isinstance(answer, kind)).values() for kind in (int, str))
    return sum(max(counts, default=0) for counts in best) / len(answers)


class CompletionGenerator:
    """Generates completions with a model and its processor.

    Args:
        model: transformers model.
        processor: processor of the model; a tokenizer for a text-only model.
        max_completion_length: largest number of tokens, at least 1.
    """

    def __init__(self, model: Any, processor: Any, max_completion_length: int) -> None:
        self.model, self.processor = model, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_completion_length = max_completion_length
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(self.tokenizer.eos_token_id if pad is None else pad)

    def encode_prompts(self, conversations: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return model inputs for conversations (or texts), left-padded, on the model's device."""
        if isinstance(conversations[0], str):
            fields = dict(self.processor(text=list(conversations)))
        else:
            if self.tokenizer is not self.processor:
                conversations = [prepare_multimodal_messages(conversation) for conversation in conversations]
            template: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            fields = dict(self.processor.apply_chat_template(list(conversations), **template))
        inputs: dict[str, torch.Tensor] = {}
        fields.pop("attention_mask", None)
        inputs["input_ids"], inputs["attention_mask"] = pad_rows(fields.pop("input_ids"), self.pad_id, "left")
        for name, value in fields.items():
            per_token = isinstance(value, list) and value and isinstance(value[0], list)
            inputs[name] = pad_rows(value, 0, "left")[0] if per_token else torch.as_tensor(value)
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def sample(self, inputs: dict[str, torch.Tensor], count: int, temperature: float) -> list[list[str]]:
        """Sample completions of each prompt, without top-k or top-p.

        Args:
            inputs: inputs of `encode_prompts`.
            count: completions per prompt; 0: none.
            temperature: sampling temperature.
        """
        if count == 0:
            return [[] for _ in inputs["input_ids"]]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "num_return_sequences": count}
        texts = self.generate(inputs, **sampling)
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def generate(self, inputs: dict[str, torch.Tensor], **sampling: Any) -> list[str]:
        """Return the completions of all prompts, decoded.

        Args:
            inputs: inputs of `encode_prompts`.
            sampling: arguments of `GenerationConfig`.
        """
        declared = self.model.generation_config.eos_token_id
        declared = [declared] if isinstance(declared, int) else declared or []
        placeholders = () if self.tokenizer is self.processor else image_token_ids(self.model.config)
        settings = GenerationConfig(
            max_new_tokens=self.max_completion_length,
            eos_token_id=sorted({*declared, self.tokenizer.eos_token_id}),
            pad_token_id=self.pad_id,
            suppress_tokens=[*placeholders] or None,  # as TRL does
            **sampling,
        )
        # generate() reads unset values (beams, top_k, …) from the checkpoint's configuration.
        owner = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        with patched_attribute(owner, "generation_config", settings):
            ids = self.model.generate(**inputs, generation_config=settings)
        return decode_with_tags(self.tokenizer, ids[:, inputs["input_ids"].shape[1] :].tolist())


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
    """Generate one greedy and `num_samples` sampled completions per question, and score them.

    Args:
        model: transformers model.
        processor: processor of the model; a tokenizer for a text-only model.
        rows: questions with `prompt` (a conversation) or `problem` (text) and `choices`; `solution`; `image`/`images`.
        num_samples: k of mean@k and pass@k; 0 for greedy only.
        temperature: sampling temperature, > 0.
        max_completion_length: largest number of tokens, at least 1.
        batch_size: questions per generation call, at least 1.
        blank_images: replace each image with mid-grey, to measure accuracy without vision.
        blind: also answer each question greedily with grey images.
        reward_funcs: functions whose means over the greedy completions are also computed.
        group_by: column; scores are also computed for each of its values.
        system_prompt: system prompt of rows with a `problem` but no `prompt`; None: none.
        seed: seed of the samples.
        progress: show a progress bar.

    Raises:
        ConfigError: `group_by` is not a column.
        DataError: no row has a usable solution, or there are no images to blank.
    """
    _check_questions(rows, group_by, blank_images)
    for function in reward_funcs:
        check_callable(function, rows[0])
    generator = CompletionGenerator(model, processor, max_completion_length)
    title = "evaluate (blank images)" if blank_images else "evaluate"
    records: list[dict[str, Any]] = []
    with evaluating(model), torch.no_grad(), keep_random_state(model.device):
        torch.manual_seed(seed)
        for start in tqdm(range(0, len(rows), batch_size), desc=title, disable=not progress):
            batch = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
            inputs = generator.encode_prompts([build_conversation(row, blank_images, system_prompt) for row in batch])
            greedy = generator.generate(inputs, do_sample=False)
            sampled = generator.sample(inputs, num_samples, temperature)
            graded = [grade(*answers) for answers in zip(batch, greedy, sampled, strict=True)]
            if blind and not blank_images and any(map(images_of, batch)):
                _add_blind_accuracy(generator, batch, graded, system_prompt)
            _add_rewards(generator, batch, graded, reward_funcs)
            records += graded
    return build_evaluation(records, None if group_by is None else [str(row[group_by]) for row in rows])


def _check_questions(rows: Sequence[Mapping[str, Any]], group_by: str | None, blank_images: bool) -> None:
    """Raise the errors of `evaluate`."""
    if not any(usable_solution(row) is not None for row in rows):
        raise DataError(f"None of the {len(rows)} rows has a usable `solution`: give a letter, an index or a text.")
    if group_by is not None and group_by not in rows[0]:
        raise ConfigError(f"group_by is {group_by!r}: give one of the columns {', '.join(rows[0])}.")
    if blank_images and not any(map(images_of, rows)):
        raise DataError("blank_images=True needs images, but no row has an `image` or `images`.")


def _add_blind_accuracy(
    generator: CompletionGenerator, rows: Sequence[Any], records: Sequence[dict[str, Any]], system_prompt: str | None
) -> None:
    """Answer the rows greedily with grey images, and add the accuracy to their records as `correct_blind`."""
    inputs = generator.encode_prompts([build_conversation(row, True, system_prompt) for row in rows])
    for record, row, text in zip(records, rows, generator.generate(inputs, do_sample=False), strict=True):
        record["correct_blind"] = grade_completions(row, [text])[0]


def _add_rewards(
    generator: CompletionGenerator, rows: Sequence[Any], records: Sequence[dict[str, Any]], functions: Sequence[Any]
) -> None:
    """Add further rewards to the records of rows; what they draw changes no sample."""
    with keep_random_state(generator.model.device):
        rewards = compute_rewards(functions, rows, records, generator.tokenizer)
    for name, values in rewards.items():
        for record, value in zip(records, values, strict=True):
            record.setdefault("rewards", {})[name] = value


def print_scores(results: Mapping[str, Evaluation]) -> None:
    """Print a table with a row per model for all questions and for each group; say if nothing was right.

    Columns that do not fit the terminal are named below it.
    """
    k, has_several = next(iter(results.values())).k, len(results) > 1
    rewards = list(dict.fromkeys(name for result in results.values() for name in result.rewards))
    numbers = ["questions", "accuracy", "95 %", "majority", "blind", "unparsable", f"mean@{k}", f"pass@{k}"]
    columns = [Column(heading, overflow="fold") for heading in ("", *["model"] * has_several)]
    columns += [Column(heading, overflow="fold", justify="right") for heading in (*numbers, "format", *rewards)]
    table = Table(*columns)
    for group in (None, *dict.fromkeys(name for result in results.values() for name in result.groups)):
        for model, result in results.items():
            scores: AnswerScores | None = result if group is None else result.groups.get(group)
            if scores is not None:
                rates = [scores.majority, scores.blind, scores.unparsable, scores.mean_at_k, scores.pass_at_k]
                rates += [scores.format, *(scores.rewards.get(name) for name in rewards)]
                low, high = scores.interval
                names = [group or "all", *[model] * has_several]
                counts = [str(scores.questions), _format_rate(scores.accuracy), f"{low:.3f}–{high:.3f}"]
                table.add_row(*names, *counts, *map(_format_rate, rates), end_section=model == list(results)[-1])
    wide, omitted = Console(width=240), list[str]()
    console = Console() if sys.stdout.isatty() else wide
    for heading in (f"pass@{k}", "majority", "unparsable", "format", *rewards):
        if wide.measure(table).maximum > console.width:
            table.columns = [column for column in table.columns if column.header != heading]
            omitted.append(heading)
    console.print(table)
    if omitted:
        console.print(f"A wider terminal also shows {', '.join(omitted)}.", highlight=False)
    for model, result in results.items():
        if result.accuracy < 0.01:
            cure = "look at its answers (--save_completions), or give the prompt that it knows (--system_prompt_file)"
            print(f"The accuracy of {model} is near 0: {cure}.", file=sys.stderr)


def _format_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
