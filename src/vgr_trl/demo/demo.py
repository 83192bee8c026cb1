"""The demo: draw questions, warm-start, train, and compare accuracy before and after.

An image shows one shape in one of four 28-pixel cells with different backgrounds. A question asks for its colour, shape
or corner, with or without the four words of this family as options.
"""

import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, disable_progress_bars
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.callbacks.trackers import Bar
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.prompts import build_prompt
from vgr_trl.demo import Options
from vgr_trl.demo.tiny_model import EOS, build_tiny_vlm
from vgr_trl.evaluation import Evaluation, evaluate, print_scores
from vgr_trl.reporting.recorder import RecordBeforeTraining
from vgr_trl.rewards.answers import LETTERS
from vgr_trl.rewards.functions import accuracy_reward, think_format_reward
from vgr_trl.trainer import DAPOTrainer

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
Split = Literal["train", "validation", "test"]
SPLITS = ("test", "validation", *8 * ("train",))  # by the hash of a scene, modulo 10

CELL = 28  # pixels: one token of a vision tower with patches of 14 pixels merged 2 x 2
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 214), "yellow": (236, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
# Each corner has its own background: from position alone, a tiny model needs thousands of steps to learn corners.
PAPERS = {
    "northwest": (255, 255, 255), "northeast": (200, 200, 210),
    "southwest": (250, 215, 180), "southeast": (190, 235, 200),
}  # fmt: skip
FAMILIES = {
    "colour": ("which colour is it?", tuple(COLOURS)),
    "shape": ("which shape is it?", SHAPES),
    "corner": ("which corner is it in?", tuple(PAPERS)),
}
BAR_FORMAT = "{l_bar}{bar}| {n_fmt} steps, at most {total_fmt} [{elapsed}, {rate_fmt}]"  # a fit may end early
EVALUATION = {"max_completion_length": 16, "system_prompt": None}
RECORDED_QUESTIONS = 32  # evaluation questions, answered twice each before the first and after the last step


@dataclass(frozen=True)
class Scene:
    """A shape with `size` and offset `x`, `y` in its cell, in pixels, and brightness `shade` and `paper`, 0 to 255."""

    colour: str
    shape: str
    corner: str
    size: int
    x: int
    y: int
    shade: int
    paper: int


def draw_questions(count: int, *, seed: int, split: Split, multiple_choice: bool = True) -> list[dict[str, Any]]:
    """Return `count` questions as rows with image, problem, choices, solution, thought, family, id and source.

    A scene belongs to one split whatever the seed, so no image of one split occurs in another. The options are
    the family's four words in random order, so the letter says nothing about the word.

    Args:
        count: number of questions.
        seed: seed of scenes, families and order of options.
        split: set of scenes; the three sets are disjoint.
        multiple_choice: whether there are choices, with a letter as the solution; otherwise it is the word.
    """
    rng = random.Random(f"{split} {seed}")  # a text seed, because close numbers give similar streams
    scenes = _draw_scenes(rng, split)
    return [_build_question(next(scenes), rng, f"{split}-{seed}-{index}", multiple_choice) for index in range(count)]


def draw_scene(scene: Scene) -> Image.Image:
    """Return the scene as an RGB image of 56 x 56 pixels."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL))
    for corner, paper in PAPERS.items():
        x, y = _corner_origin(corner)
        image.paste(_shade(paper, scene.paper - 255), (x, y, x + CELL, y + CELL))
    left, top = (start + shift for start, shift in zip(_corner_origin(scene.corner), (scene.x, scene.y), strict=True))
    right, bottom = left + scene.size - 1, top + scene.size - 1
    fill, arm = _shade(COLOURS[scene.colour], scene.shade - 128), math.ceil(scene.size / 3)
    pen = ImageDraw.Draw(image)
    if scene.shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif scene.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif scene.shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=fill)
    else:
        pen.rectangle((left + arm, top, right - arm, bottom), fill=fill)
        pen.rectangle((left, top + arm, right, bottom - arm), fill=fill)
    return image


def _corner_origin(corner: str) -> tuple[int, int]:
    return (CELL if corner.endswith("east") else 0, CELL if corner.startswith("south") else 0)


def _shade(colour: tuple[int, int, int], change: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, channel + change)) for channel in colour)


def _draw_scenes(rng: random.Random, split: Split) -> Iterator[Scene]:
    while True:
        size, words = rng.randint(17, 25), {family: rng.choice(values) for family, (_, values) in FAMILIES.items()}
        x, y = (rng.randint(1, CELL - 1 - size) for _ in range(2))
        scene = Scene(**words, size=size, x=x, y=y, shade=rng.randint(108, 148), paper=rng.randint(215, 255))
        if SPLITS[zlib.crc32(repr(scene).encode()) % 10] == split:
            yield scene


def _build_question(scene: Scene, rng: random.Random, name: str, multiple_choice: bool) -> dict[str, Any]:
    family = rng.choice(tuple(FAMILIES))
    problem, words = FAMILIES[family]
    choices, solution = rng.sample(words, len(words)), vars(scene)[family]
    row = {
        "id": name,
        "source": "shapes",
        "family": family,
        "image": draw_scene(scene),
        "problem": problem,
        "solution": solution,
        "thought": f"a {scene.colour} {scene.shape} {scene.corner}",
    }
    return row | {"choices": choices, "solution": LETTERS[choices.index(solution)]} if multiple_choice else row


@dataclass(frozen=True)
class Questions:
    """Rows by purpose; `train`, `validation` and `test` share no image.

    Attributes:
        validation: decides when the warm start stops.
        test: measures accuracy before and after.
        text: teaches without images to derive an answer from a thought; empty: `train`.
        shown: teaches to describe images; empty: `train`.
    """

    train: Rows
    validation: Rows
    test: Rows
    text: Rows = field(default_factory=list)
    shown: Rows = field(default_factory=list)


def draw(seed: int) -> Questions:
    """Return the open questions of the demo."""
    ask = partial(draw_questions, seed=seed, multiple_choice=False)
    return Questions(ask(3000, split="train"), ask(128, split="validation"), ask(320, split="test"))


def build_row_prompt(row: Row) -> list[dict[str, Any]]:
    """Return the conversation that asks a question, without its image."""
    return build_prompt(row["problem"], row.get("choices"), system_prompt=None)


def words_of(rows: Rows) -> list[str]:
    """Return the distinct texts that the model reads and writes."""
    return list(dict.fromkeys(text for row in rows for text in (build_row_prompt(row)[0]["content"], target_text(row))))


def to_dataset(rows: Rows) -> Dataset:
    """Return the rows as a data set with the columns that the trainer and the rewards read."""
    names = [name for name in ("id", "image", "solution", "choices", "family", "source") if name in rows[0]]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    return Dataset.from_dict({"prompt": [build_row_prompt(row) for row in rows]} | columns)


def target_text(row: Row) -> str:
    """Return the target completion of a row; a row without a `solution` is a caption."""
    if row.get("solution") is None:
        return f"<think>{row['thought']}</think>"
    return f"<think>{row['thought']}</think><answer>{row['solution']}</answer>{EOS}"


def supervised_loss(
    model: Any, processor: Any, rows: Sequence[Row], *, images: bool, thought_weight: float = 1.0
) -> tuple[torch.Tensor, float]:
    """Return the mean loss over target tokens, and over answer tokens alone.

    Args:
        model: model with logits (N, T, vocabulary).
        processor: processor of the model.
        rows: N rows with problem, choices (or None), thought, solution, and image if `images`.
        images: whether the model sees the images.
        thought_weight: weight of the mean over the other tokens, which is added to the mean over the answer.
    """
    prompts, targets = [build_row_prompt(row) for row in rows], [target_text(row) for row in rows]
    if images:
        prompts = [prepare_multimodal_messages(prompts[i], images=[row["image"]]) for i, row in enumerate(rows)]
    texts = processor.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    inputs = processor(
        text=[text + target for text, target in zip(texts, targets, strict=True)],
        images=[[row["image"]] for row in rows] if images else None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    lengths = torch.tensor([len(ids) for ids in processor.tokenizer(targets)["input_ids"]])  # (N,)
    longest = int(lengths.max())
    inputs, lengths = inputs.to(model.device), lengths.to(model.device)
    logits = model(**inputs, logits_to_keep=longest + 1).logits[:, :-1].float()  # (N, T, vocabulary)
    labels = inputs["input_ids"][:, -longest:]  # (N, T), targets end at the right
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # (N, T)
    opening, closing = processor.tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
    opened, closed = ((labels == tag).cumsum(1) > 0 for tag in (opening, closing))
    is_target = torch.arange(longest, device=model.device) >= longest - lengths[:, None]
    is_answer = opened & ~closed & (labels != opening) & is_target
    other_loss = losses[is_target & ~is_answer].mean()
    if not is_answer.any():
        return other_loss, other_loss.item()
    answer_mean = losses[is_answer].mean()
    return answer_mean + thought_weight * other_loss, answer_mean.item()


def fit(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    title: str,
    *,
    target_loss: float = 0.0,
    is_done: Callable[[int], bool] = lambda step: False,
    max_steps: int = 600,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
    **loss_options: Any,
) -> int:
    """Train on random batches of `rows` and return the number of steps.

    Args:
        model: model, trained in place.
        processor: processor of the model.
        rows: questions or captions.
        title: label of the progress bar.
        target_loss: stop when the moving average of the answer loss (initially 3) is below this, in nats.
        is_done: called with the step, counted from 1; returns whether to stop.
        max_steps: maximum number of steps.
        batch_size: rows of a step.
        learning_rate: learning rate after 10 steps of warm-up.
        seed: seed of the order of rows.
        loss_options: arguments of `supervised_loss`.
    """
    rng, was_training, step, average = random.Random(seed), model.training, 0, 3.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    with tqdm(total=max_steps, desc=title, bar_format=BAR_FORMAT) as bar:
        for step in range(1, max_steps + 1):
            model.train()
            loss, answer_loss = supervised_loss(model, processor, rng.sample(rows, batch_size), **loss_options)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            bar.update()
            average = 0.95 * average + 0.05 * answer_loss
            if average < target_loss or is_done(step):
                break
        bar.total = step  # a fit that stops early shows 100 %
    model.train(was_training)
    return step


def learn_answers(model: Any, processor: Any, rows: Sequence[Row], **settings: Any) -> int:
    """Teach the model without images to derive the answer from a thought; return the number of steps.

    Stops by default when the answer loss is below 0.08 nats.

    Args:
        model: tiny model, trained in place.
        processor: processor of the model.
        rows: questions.
        settings: arguments of `fit`.
    """
    settings = {"target_loss": 0.08, "max_steps": 1500, "learning_rate": 1e-3, **settings}
    return fit(model, processor, rows, "warm start (text)", images=False, thought_weight=0.2, **settings)


def learn_captions(model: Any, processor: Any, rows: Sequence[Row], **settings: Any) -> int:
    """Teach to write the thought for an image, without a question; return the number of steps.

    Stops by default when the loss is below 0.7 nats.

    Args:
        model: tiny model, trained in place.
        processor: processor of the model.
        rows: questions with images.
        settings: arguments of `fit`.
    """
    captions = [{"problem": "", "image": row["image"], "thought": row["thought"]} for row in rows]
    settings = {"target_loss": 0.7, "batch_size": 64, **settings}
    return fit(model, processor, captions, "warm start (captions)", images=True, **settings)


def warm_start(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    *,
    accuracy: Callable[[], float],
    target_accuracy: float = 0.55,
    measure_every: int = 10,
    max_steps: int = 600,
    **settings: Any,
) -> list[tuple[int, float]]:
    """Teach to read the words of the thought off the image; return the measured (step, accuracy) pairs.

    Args:
        model: a Qwen2.5-VL model, best after `learn_answers` and `learn_captions`.
        rows: rows with image, problem, choices (or None), thought and solution.
        accuracy: measures the model on questions that are not used for anything else.
        target_accuracy: stop here, so that something is left to reinforce; in [0, 1].
        measure_every: steps between measurements, at least 1.
        max_steps: stop here at the latest.
        settings: arguments of `fit`.
    """
    history: list[tuple[int, float]] = []

    def is_done(step: int) -> bool:
        if step % measure_every and step != max_steps:
            return False
        history.append((step, accuracy()))
        return history[-1][1] >= target_accuracy

    title = "warm start (images)"
    fit(model, processor, rows, title, is_done=is_done, images=True, max_steps=max_steps, **settings)
    return history


def warm_up(model: Any, processor: Any, questions: Questions, options: Options) -> None:
    """Train the model, supervised, up to `warm_start_accuracy` on the validation questions.

    Args:
        model: tiny model, trained in place.
        processor: processor of the model.
        questions: rows by purpose.
        options: options of the demo.
    """
    model.to(options.device)
    seed, shown = options.seed, questions.shown or questions.train
    size: Any = {"max_steps": options.text_steps, "batch_size": options.text_batch_size}
    rate, text = options.text_learning_rate, questions.text or questions.train
    learn_answers(model, processor, text, target_loss=options.text_loss, learning_rate=rate, seed=seed, **size)
    learn_captions(model, processor, shown, target_loss=options.caption_loss, seed=seed)

    def accuracy() -> float:
        settings: Any = {**EVALUATION, "batch_size": 128, "progress": False}
        return evaluate(model, processor, questions.validation, num_samples=4, **settings).mean_at_k or 0.0

    target = options.warm_start_accuracy
    warm_start(model, processor, shown, accuracy=accuracy, target_accuracy=target, seed=seed)


def reinforce(model: Any, processor: Any, questions: Questions, options: Options, output_dir: Path) -> None:
    """Train `model` in place with `DAPOTrainer`; leave model, state and rollouts in `output_dir`.

    The first validation questions are answered before the first step and after the last step, for the records; an
    evaluation in between would change the random numbers of training.

    Args:
        model: tiny model, trained in place.
        processor: processor of the model.
        questions: rows by purpose.
        options: options of the demo.
        output_dir: folder of the run.
    """
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": options.steps, "num_generations_eval": 2}
    batch = {"per_device_eval_batch_size": 2 * RECORDED_QUESTIONS, "rollout_log_samples": 16}
    trainer = DAPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=trainer_options(options, output_dir, **evaluated, **batch),
        train_dataset=to_dataset(questions.train),
        eval_dataset=to_dataset(questions.validation[:RECORDED_QUESTIONS]),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReinforceBar())
    trainer.add_callback(RecordBeforeTraining(trainer))
    trainer.train()
    trainer.save_model(str(output_dir))
    trainer.save_state()


def trainer_options(options: Options, output_dir: Path, **changed: Any) -> DAPOConfig:
    """Return the options of `DAPOTrainer` for a small model, some of them changed."""
    batch = options.prompts_per_step * options.num_generations
    chosen: dict[str, Any] = {
        "output_dir": str(output_dir), "seed": options.seed, "max_steps": options.steps, "bf16": False,
        "use_cpu": options.device == "cpu", "max_completion_length": 16,
        "per_device_train_batch_size": batch, "num_generations": options.num_generations,
        "learning_rate": options.learning_rate, "warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup",
        "reward_weights": [1.0, 0.2], "gradient_checkpointing": False,
        "logging_steps": 1, "log_completions": True, "num_completions_to_print": 0, "report_to": "none",
        "save_strategy": "no", "dataloader_pin_memory": False,
        "disable_tqdm": False,  # logging errors only, as here, would turn the bar off and a printer on
    }  # fmt: skip
    return DAPOConfig(**chosen | changed)


class ReinforceBar(Bar):
    """The trainer's progress bar with the mean reward in it, instead of a dictionary printed at every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the reward."""
        if self.training_bar is not None and logs and "reward" in logs:
            self.training_bar.set_postfix(reward=f"{logs['reward']:.2f}", refresh=False)


def set_up_process(options: Options) -> None:
    """Seed torch, set the number of threads, and silence bars of work that takes well under a second.

    One thread by default: operations this small gain little from a second one, and lose a hundredfold when something
    else keeps its core busy (seen: 3 s per step instead of 0.03 s).
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def run_demo(options: Options, output_dir: Path, questions: Questions | None = None) -> bool:
    """Draw questions, then warm-start, evaluate, reinforce, evaluate; print a table.

    Returns whether sampled accuracy on held-out questions rose.

    Args:
        options: options of the demo.
        output_dir: folder for the run.
        questions: rows by purpose; None: draw them.
    """
    started = time.monotonic()
    set_up_process(options)
    questions = questions or draw(options.seed)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=options.seed)

    def measure() -> Evaluation:
        settings: Any = {**EVALUATION, "batch_size": 64, "group_by": "family", "num_samples": options.num_samples}
        return evaluate(model, processor, questions.test, blind=True, **settings)

    warm_up(model, processor, questions, options)
    before = measure()
    reinforce(model, processor, questions, options, output_dir)
    results = {"before": before, "after": measure()}
    seconds, rose = round(time.monotonic() - started, 1), (results["after"].mean_at_k or 0) > (before.mean_at_k or 0)
    metrics = {name: result.to_dict() for name, result in results.items()}
    content = {"options": asdict(options), "seconds": seconds, "rose": rose, **metrics}
    (output_dir / "metrics.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"On {len(questions.test)} held-out questions:")
    print_scores(results)
    first, last = (f"{result.mean_at_k or 0:.3f}" for result in results.values())
    verdict = f"{'rose' if rose else 'did not rise'}: {first} → {last}"
    print(f"In {seconds:.0f} s sampled accuracy (mean@{before.k}) on {len(questions.test)} new questions {verdict}.")
    print(f"Model, metrics and completions are in {output_dir}. Next: vgr-trl report {output_dir}")
    return rose
