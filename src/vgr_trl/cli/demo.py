"""`vgr-trl demo`: warm-start a tiny vision-language model, train it with `DAPOTrainer`, compare before and after."""

import argparse
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from transformers import ProgressCallback
from transformers.utils import logging

from vgr_trl.cli.demo_report import Comparison, comparison_table, write_metrics
from vgr_trl.cli.run_folder import claim_again, write_identity
from vgr_trl.config import DAPOConfig
from vgr_trl.data.prompts import build_prompt
from vgr_trl.demo.shapes import draw_questions
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.demo.warm_start import learn_answers, learn_captions, target_text, warm_start
from vgr_trl.evaluation import Evaluation, evaluate
from vgr_trl.rewards import accuracy_reward, think_format_reward
from vgr_trl.trainer import DAPOTrainer

Rows = list[dict[str, Any]]
IDENTITY = {"command": "demo"}  # a demo may be run again in its own folder, not in another run's


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


@dataclass(frozen=True)
class Options:
    """Of one run; the seed drives questions, weights, order and sampling."""

    seed: int = 0
    steps: int = 100
    learning_rate: float = 3e-4
    lr_scheduler_type: str = "constant_with_warmup"
    temperature: float = 1.0
    prompts_per_step: int = 24
    num_generations: int = 8
    text_learning_rate: float = 1e-3
    text_batch_size: int = 32
    text_steps: int = 1500
    text_loss: float = 0.08
    caption_loss: float = 0.52
    warm_start_accuracy: float = 0.55
    num_samples: int = 8
    threads: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if held-out accuracy rose, else 1."""
    parser = argparse.ArgumentParser(prog="vgr-trl demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and sampling (default 0)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="run folder (default runs/demo)")
    parser.add_argument("--steps", type=int, default=Options.steps, help=f"of reinforcement (default {Options.steps})")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1; see set_up_process)")
    flags = parser.parse_args(argv)
    claim_again(flags.output_dir, IDENTITY)
    write_identity(flags.output_dir, IDENTITY)
    comparison = run_demo(Options(seed=flags.seed, steps=flags.steps, threads=flags.threads), flags.output_dir)
    return 0 if comparison.rose else 1


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
    seconds["reinforce"] = timed(lambda: reinforce(model, processor, questions.train, options, output_dir))
    after, blank_after = measure(model, processor, questions.test, options)
    comparison = Comparison(before, after, blank_before, blank_after)
    seconds["total"] = time.monotonic() - started
    write_metrics(comparison, asdict(options), seconds, output_dir)
    console = Console()
    console.print(comparison_table(comparison))
    console.print(f"{seconds['total']:.0f} s. Model, metrics and rollouts are in {output_dir}.")
    if not comparison.rose:
        console.print("Held-out sampled accuracy did not rise.")
    return comparison


def timed(action: Any) -> float:
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


def words_of(rows: Rows) -> list[str]:
    """Return the distinct texts that the model is going to read and write."""
    texts: dict[str, None] = {}
    for row in rows:
        texts[build_prompt(row["problem"], row.get("choices"), system_prompt=None)[0]["content"]] = None
        texts[target_text(row)] = None
    return list(texts)


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


def reinforce(model: Any, processor: Any, rows: Rows, options: Options, output_dir: Path) -> None:
    """Train `model` in place with `DAPOTrainer`; leave model, state and rollouts in `output_dir`."""
    trainer = DAPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=trainer_options(options, output_dir),
        train_dataset=as_dataset(rows),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReinforceBar())
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


def as_dataset(rows: Rows) -> Dataset:
    """Return the columns that the trainer and the rewards read."""
    names = [name for name in ("id", "image", "solution", "choices", "family", "source") if name in rows[0]]
    prompts = [build_prompt(row["problem"], row.get("choices"), system_prompt=None) for row in rows]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    return Dataset.from_dict({"prompt": prompts} | columns)


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
