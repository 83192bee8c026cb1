"""The demo on one page: drawn questions, a warm start, reinforcement, and the comparison of before and after.

An image shows one shape in one of four 28-pixel cells of different paper. Three words describe it (colour, shape,
corner), and all three have to be read off the image; a question asks for one of them, with or without the four words of
its family as options.
"""

import json
import math
import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, disable_progress_bars
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.prompts import LETTERS, build_prompt
from vgr_trl.demo import Options
from vgr_trl.demo.tiny_model import EOS, build_tiny_vlm
from vgr_trl.evaluation import Evaluation, evaluate
from vgr_trl.reporting.recorder import RecordBefore
from vgr_trl.rewards.accuracy import accuracy_reward
from vgr_trl.rewards.simple import think_format_reward
from vgr_trl.trainer import DAPOTrainer

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
Split = Literal["train", "validation", "test"]

CELL = 28  # pixels: one token of a vision tower with patches of 14 pixels merged 2 x 2
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 214), "yellow": (236, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
# Each corner has a paper of its own: a place that shows only as a position takes a tiny model thousands of steps.
PAPERS = {
    "northwest": (255, 255, 255),
    "northeast": (200, 200, 210),
    "southwest": (250, 215, 180),
    "southeast": (190, 235, 200),
}
FAMILIES = {
    "colour": ("which colour is it?", tuple(COLOURS)),
    "shape": ("which shape is it?", SHAPES),
    "corner": ("which corner is it in?", tuple(PAPERS)),
}
RECORDED = 32  # questions of the evaluation, answered twice each, before the first step and after the last one


@dataclass(frozen=True)
class Scene:
    """One shape; `size`, `x` and `y` (of its top left pixel, in its cell) in pixels; `shade` and `paper` 0 to 255."""

    colour: str
    shape: str
    corner: str
    size: int
    x: int
    y: int
    shade: int
    paper: int

    @property
    def words(self) -> dict[str, str]:
        """The word that is right for each family."""
        return {"colour": self.colour, "shape": self.shape, "corner": self.corner}


def draw_questions(count: int, *, seed: int, split: Split, multiple_choice: bool = True) -> list[dict[str, Any]]:
    """Return `count` questions as rows with image, problem, choices, solution, thought, family, id and source.

    A scene belongs to one split whatever the seed, so no image of one split occurs in another. The options are
    the family's four words in random order, so the letter says nothing about the word.

    Args:
        count: at least 0.
        seed: of scenes, families and order of options.
        split: which of the three disjoint sets of scenes to draw from.
        multiple_choice: the solution is a letter; otherwise there are no choices and the solution is the word.
    """
    rng = random.Random(f"{split} {seed}")  # a text seed, because seeds of numbers that are close give similar streams
    scenes = _scenes(rng, split)
    rows = [_question(next(scenes), rng, f"{split}-{seed}-{index}") for index in range(count)]
    return rows if multiple_choice else [as_open_question(row) for row in rows]


def as_open_question(row: dict[str, Any]) -> dict[str, Any]:
    """Return a multiple-choice row without its choices; the solution becomes the word behind the letter."""
    solution = row["choices"][LETTERS.index(row["solution"])]
    return {**{name: value for name, value in row.items() if name != "choices"}, "solution": solution}


def split_of(scene: Scene) -> Split:
    """Return the split that `scene` belongs to: eight in ten train, one validation, one test."""
    bucket = zlib.crc32(repr(scene).encode()) % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw_scene(scene: Scene) -> Image.Image:
    """Return the scene as an RGB image of 56 x 56 pixels."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL))
    for corner, paper in PAPERS.items():
        x, y = _origin(corner)
        image.paste(_shaded(paper, scene.paper - 255), (x, y, x + CELL, y + CELL))
    left, top = (start + shift for start, shift in zip(_origin(scene.corner), (scene.x, scene.y), strict=True))
    right, bottom = left + scene.size - 1, top + scene.size - 1
    fill = _shaded(COLOURS[scene.colour], scene.shade - 128)
    pen = ImageDraw.Draw(image)
    if scene.shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif scene.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif scene.shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=fill)
    else:
        arm = math.ceil(scene.size / 3)
        pen.rectangle((left + arm, top, right - arm, bottom), fill=fill)
        pen.rectangle((left, top + arm, right, bottom - arm), fill=fill)
    return image


def _origin(corner: str) -> tuple[int, int]:
    return (CELL if corner.endswith("east") else 0, CELL if corner.startswith("south") else 0)


def _shaded(colour: tuple[int, int, int], change: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, channel + change)) for channel in colour)


def _scenes(rng: random.Random, split: Split) -> Iterator[Scene]:
    while True:
        size = rng.randint(17, 25)
        scene = Scene(
            colour=rng.choice(tuple(COLOURS)),
            shape=rng.choice(SHAPES),
            corner=rng.choice(tuple(PAPERS)),
            size=size,
            x=rng.randint(1, CELL - 1 - size),
            y=rng.randint(1, CELL - 1 - size),
            shade=rng.randint(108, 148),
            paper=rng.randint(215, 255),
        )
        if split_of(scene) == split:
            yield scene


def _question(scene: Scene, rng: random.Random, name: str) -> dict[str, Any]:
    family = rng.choice(tuple(FAMILIES))
    problem, words = FAMILIES[family]
    choices = rng.sample(words, len(words))
    return {
        "id": name,
        "source": "shapes",
        "family": family,
        "image": draw_scene(scene),
        "problem": problem,
        "choices": choices,
        "solution": LETTERS[choices.index(scene.words[family])],
        "thought": " ".join(["a", *scene.words.values()]),
    }


@dataclass(frozen=True)
class Questions:
    """Rows for every use: `validation` stops the warm start, `test` measures; they share no image with each other or
    with `train`. `text` teaches, without images, to go from a thought to an answer, `shown` what is in an image; where
    they are empty, `train` does."""

    train: Rows
    validation: Rows
    test: Rows
    text: Rows = field(default_factory=list)
    shown: Rows = field(default_factory=list)


def draw(seed: int) -> Questions:
    """Return the open questions of the demo."""
    return Questions(
        train=draw_questions(3000, seed=seed, split="train", multiple_choice=False),
        validation=draw_questions(128, seed=seed, split="validation", multiple_choice=False),
        test=draw_questions(320, seed=seed, split="test", multiple_choice=False),
    )


def words_of(rows: Rows) -> list[str]:
    """Return the distinct texts that the model is going to read and write."""
    texts: dict[str, None] = {}
    for row in rows:
        texts[build_prompt(row["problem"], row.get("choices"), system_prompt=None)[0]["content"]] = None
        texts[target_text(row)] = None
    return list(texts)


def as_dataset(rows: Rows) -> Dataset:
    """Return the columns that the trainer and the rewards read."""
    names = [name for name in ("id", "image", "solution", "choices", "family", "source") if name in rows[0]]
    prompts = [build_prompt(row["problem"], row.get("choices"), system_prompt=None) for row in rows]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    return Dataset.from_dict({"prompt": prompts} | columns)


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


def _is_answer(processor: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return which tokens stand between <answer> and </answer>, (N, T)."""
    opening, closing = processor.tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
    opened = (labels == opening).cumsum(1) > 0
    closed = (labels == closing).cumsum(1) > 0
    inside: torch.Tensor = opened & ~closed & (labels != opening)
    return inside


def fit(
    model: Any,
    rows: Sequence[Any],
    loss_of: Callable[[Any], tuple[torch.Tensor, float]],
    is_done: Callable[[int, float], bool],
    title: str,
    *,
    max_steps: int,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> int:
    """Train on random batches of `rows` and return the number of steps.

    Args:
        loss_of: gives the loss of a batch, and the number that `is_done` looks at.
        is_done: whether to stop, of the step (from 1) and that number.
    """
    rng, was_training = random.Random(seed), model.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    with tqdm(total=max_steps, desc=title) as bar:
        for step in range(1, max_steps + 1):
            model.train()
            loss, watched = loss_of(rng.sample(rows, batch_size))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            bar.update()
            if is_done(step, watched):
                break
    model.train(was_training)
    return step


def is_below(target: float) -> Callable[[int, float], bool]:
    """Return whether a moving average, which starts at 3, is below `target`, as `fit` asks it."""
    average = 3.0

    def is_done(step: int, value: float) -> bool:
        nonlocal average
        average = 0.95 * average + 0.05 * value
        return average < target

    return is_done


def learn_answers(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    *,
    target_loss: float = 0.08,
    max_steps: int = 1500,
    **settings: Any,
) -> int:
    """Teach, without images, to go from the words of a thought to the answer; return the number of steps.

    Stops when a moving average of the answer's loss is below `target_loss`, in nats; `settings` go to `fit`.
    """

    def loss_of(batch: Sequence[Row]) -> tuple[torch.Tensor, float]:
        return supervised_loss(model, processor, batch, images=False, thought_weight=0.2)

    settings = {"learning_rate": 1e-3, **settings}
    return fit(model, rows, loss_of, is_below(target_loss), "warm start (text)", max_steps=max_steps, **settings)


def learn_captions(
    model: Any, processor: Any, rows: Sequence[Row], *, target_loss: float = 0.7, max_steps: int = 600, **settings: Any
) -> int:
    """Teach to write the thought for an image, without a question; return the number of steps.

    Stops when a moving average of the loss is below `target_loss`, in nats; `settings` go to `fit`.
    """
    captions = [{"problem": "", "image": row["image"], "thought": row["thought"]} for row in rows]
    settings = {"batch_size": 64, **settings}

    def loss_of(batch: Sequence[Row]) -> tuple[torch.Tensor, float]:
        return supervised_loss(model, processor, batch, images=True)

    return fit(
        model, captions, loss_of, is_below(target_loss), "warm start (captions)", max_steps=max_steps, **settings
    )


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
        rows: with image, problem, choices (or None), thought and solution.
        accuracy: measures the model on questions that are not used for anything else.
        target_accuracy: stop here, so that something is left to reinforce; in [0, 1].
        measure_every: steps between measurements, at least 1.
        max_steps: stop here at the latest.
        settings: of `fit`.
    """
    history: list[tuple[int, float]] = []

    def loss_of(batch: Sequence[Row]) -> tuple[torch.Tensor, float]:
        return supervised_loss(model, processor, batch, images=True)

    def is_done(step: int, _: float) -> bool:
        if step % measure_every and step != max_steps:
            return False
        history.append((step, accuracy()))
        return history[-1][1] >= target_accuracy

    fit(model, rows, loss_of, is_done, "warm start (images)", max_steps=max_steps, **settings)
    return history


def warm_up(model: Any, processor: Any, questions: Questions, options: Options) -> None:
    """Bring the model to `warm_start_accuracy` on the validation questions."""
    seed, shown = options.seed, questions.shown or questions.train
    of_text: Any = {
        "max_steps": options.text_steps,
        "batch_size": options.text_batch_size,
        "target_loss": options.text_loss,
    }
    text = questions.text or questions.train
    learn_answers(model, processor, text, learning_rate=options.text_learning_rate, seed=seed, **of_text)
    learn_captions(model, processor, shown, target_loss=options.caption_loss, seed=seed)

    def accuracy() -> float:
        settings: Any = {"max_completion_length": 16, "batch_size": 128, "system_prompt": None, "progress": False}
        return evaluate(model, processor, questions.validation, num_samples=4, **settings).mean_at_k or 0.0

    target = options.warm_start_accuracy
    warm_start(model, processor, shown, accuracy=accuracy, target_accuracy=target, seed=seed)


def reinforce(model: Any, processor: Any, rows: Rows, asked: Rows, options: Options, output_dir: Path) -> None:
    """Train `model` in place with `DAPOTrainer` on `rows`; leave model, state and rollouts in `output_dir`.

    The first of `asked` are answered before the first step and after the last one, for the records; in between they
    would change what is sampled in training.
    """
    trainer = DAPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=trainer_options(
            options,
            output_dir,
            eval_strategy="steps",
            eval_steps=options.steps,
            num_generations_eval=2,
            per_device_eval_batch_size=2 * RECORDED,
            rollout_log_samples=16,
        ),
        train_dataset=as_dataset(rows),
        eval_dataset=as_dataset(asked[:RECORDED]),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReinforceBar())
    trainer.add_callback(RecordBefore(trainer))
    trainer.train()
    trainer.save_model(str(output_dir))
    trainer.save_state()


def trainer_options(options: Options, output_dir: Path, **changed: Any) -> DAPOConfig:
    """Return the options of `DAPOTrainer` for a model of a million parameters on a CPU, some of them changed."""
    chosen: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": options.seed,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.prompts_per_step * options.num_generations,
        "num_generations": options.num_generations,
        "max_completion_length": 16,
        "temperature": options.temperature,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.lr_scheduler_type,
        "warmup_steps": 3,
        "reward_weights": [1.0, 0.2],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": False,  # logging errors only, as here, would turn the bar off and a printer on
        "dataloader_pin_memory": False,
    }
    return DAPOConfig(**chosen | changed)


class ReinforceBar(ProgressCallback):
    """The trainer's progress bar with the mean reward in it, instead of a dictionary printed at every step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("reinforce")

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
    # Not ours: TRL 1.16 asks the model, at every step, for a property that transformers has renamed.
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing", category=FutureWarning)


@dataclass(frozen=True)
class Comparison:
    """What was measured before and after reinforcement, with the images and with blank ones."""

    before: Evaluation
    after: Evaluation
    blank_before: Evaluation
    blank_after: Evaluation

    @property
    def rose(self) -> bool:
        """Whether sampled accuracy on held-out questions rose."""
        return (self.after.mean_at_k or 0.0) > (self.before.mean_at_k or 0.0)


def run_demo(options: Options, output_dir: Path) -> Comparison:
    """Draw questions, then warm-start, evaluate, reinforce, evaluate; leave the run in `output_dir`, print a table."""
    return run(draw(options.seed), options, output_dir)


def run(questions: Questions, options: Options, output_dir: Path) -> Comparison:
    """Warm-start a new model, evaluate, reinforce, evaluate; leave the run in `output_dir`, print a table."""
    started = time.monotonic()
    set_up_process(options)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=options.seed)

    def measure(blank: bool) -> Evaluation:
        settings: Any = {"max_completion_length": 16, "batch_size": 64, "system_prompt": None, "group_by": "family"}
        count = options.num_samples
        return evaluate(model, processor, questions.test, num_samples=count, blank_images=blank, **settings)

    warm_up(model, processor, questions, options)
    warm = time.monotonic()
    before, blank_before = measure(False), measure(True)
    measured = time.monotonic()
    reinforce(model, processor, questions.train, questions.validation, options, output_dir)
    reinforced = time.monotonic()
    comparison = Comparison(before, measure(False), blank_before, measure(True))
    seconds = {"warm_start": warm - started, "reinforce": reinforced - measured, "total": time.monotonic() - started}
    metrics = {
        "options": asdict(options),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "rose": comparison.rose,
        **{name: getattr(comparison, name).to_dict() for name in ("before", "after", "blank_before", "blank_after")},
    }
    (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    console = Console()
    console.print(comparison_table(comparison))
    console.print(f"{seconds['total']:.0f} s. Model, metrics and rollouts: vgr-trl report {output_dir}")
    if not comparison.rose:
        console.print("Held-out sampled accuracy did not rise.")
    return comparison


def comparison_table(comparison: Comparison) -> Table:
    """Return accuracy, accuracy with blank images and format, before and after."""
    before, after = comparison.before, comparison.after
    blank_before, blank_after = comparison.blank_before, comparison.blank_after
    table = Table(title=f"{before.questions} held-out questions, {before.k} samples each")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name, old, new in (
        ("accuracy, greedy", before.accuracy, after.accuracy),
        ("accuracy, sampled", before.mean_at_k, after.mean_at_k),
        ("accuracy, image blanked, sampled", blank_before.mean_at_k, blank_after.mean_at_k),
        ("format, sampled", before.format_sampled, after.format_sampled),
        *(
            (f"  {family}, sampled", scores.mean_at_k, after.groups[family].mean_at_k)
            for family, scores in before.groups.items()
        ),
    ):
        table.add_row(name, f"{old:.3f}", f"{new:.3f}")
    return table
