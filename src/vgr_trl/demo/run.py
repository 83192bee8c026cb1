"""The demo: warm-start a tiny vision-language model, train it with `DAPOTrainer`, compare before and after."""

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from rich.console import Console
from transformers.utils import logging

from vgr_trl.demo.comparison import Comparison, comparison_table, write_metrics
from vgr_trl.demo.dataset import Rows, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import reinforce
from vgr_trl.demo.shapes import draw_questions
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.demo.warm_start import learn_answers, learn_captions, warm_start
from vgr_trl.evaluation import Evaluation, evaluate


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


def run_demo(options: Options, output_dir: Path) -> Comparison:
    """Draw questions, then warm-start, evaluate, reinforce, evaluate; leave the run in `output_dir`, print a table."""
    return run(draw(options.seed), options, output_dir)


def draw(seed: int) -> Questions:
    """Return the open questions of the demo."""
    return Questions(
        train=draw_questions(3000, seed=seed, split="train", multiple_choice=False),
        validation=draw_questions(128, seed=seed, split="validation", multiple_choice=False),
        test=draw_questions(320, seed=seed, split="test", multiple_choice=False),
    )


def run(questions: Questions, options: Options, output_dir: Path) -> Comparison:
    """Warm-start a new model, evaluate, reinforce, evaluate; leave the run in `output_dir`, print a table."""
    started = time.monotonic()
    set_up_process(options)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=options.seed)
    seconds = {"warm_start": timed(lambda: warm_up(model, processor, questions, options))}
    before, blank_before = measure(model, processor, questions.test, options)
    seconds["reinforce"] = timed(
        lambda: reinforce(model, processor, questions.train, questions.validation, options, output_dir)
    )
    after, blank_after = measure(model, processor, questions.test, options)
    comparison = Comparison(before, after, blank_before, blank_after)
    seconds["total"] = time.monotonic() - started
    write_metrics(comparison, asdict(options), seconds, output_dir)
    console = Console()
    console.print(comparison_table(comparison))
    console.print(f"{seconds['total']:.0f} s. Model, metrics and rollouts: vgr-trl report {output_dir}")
    if not comparison.rose:
        console.print("Held-out sampled accuracy did not rise.")
    return comparison


def timed(action: Callable[[], Any]) -> float:
    """Run `action` and return the seconds it took."""
    started = time.monotonic()
    action()
    return time.monotonic() - started


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


def warm_up(model: Any, processor: Any, questions: Questions, options: Options) -> None:
    """Bring the model to `warm_start_accuracy` on the validation questions."""
    learn_answers(
        model,
        processor,
        questions.text or questions.train,
        learning_rate=options.text_learning_rate,
        batch_size=options.text_batch_size,
        max_steps=options.text_steps,
        target_loss=options.text_loss,
        seed=options.seed,
    )
    shown = questions.shown or questions.train
    learn_captions(model, processor, shown, seed=options.seed, target_loss=options.caption_loss)

    def accuracy() -> float:
        result = evaluate(
            model,
            processor,
            questions.validation,
            num_samples=4,
            max_completion_length=16,
            batch_size=128,
            system_prompt=None,
            progress=False,
        )
        return result.mean_at_k or 0.0

    warm_start(
        model,
        processor,
        shown,
        accuracy=accuracy,
        target_accuracy=options.warm_start_accuracy,
        seed=options.seed,
    )


def measure(model: Any, processor: Any, rows: Rows, options: Options) -> tuple[Evaluation, Evaluation]:
    """Return the scores on `rows`, by family, with the images and with blank ones."""
    settings: dict[str, Any] = {
        "system_prompt": None,
        "max_completion_length": 16,
        "batch_size": 64,
        "group_by": "family",
    }
    seen = evaluate(model, processor, rows, num_samples=options.num_samples, **settings)
    blank = evaluate(model, processor, rows, num_samples=options.num_samples, blank_images=True, **settings)
    return seen, blank
