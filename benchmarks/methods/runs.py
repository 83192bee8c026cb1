"""One model, warm-started and trained by one method; what it came to."""

import copy
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from looks import looks
from transformers import PrinterCallback, TrainerCallback

from methods.contenders import Method
from methods.tasks import Task
from methods.thoughts import in_thoughts
from vgr_trl.demo import Options
from vgr_trl.demo.demo import (
    Questions,
    Rows,
    learn_answers,
    learn_captions,
    set_up_process,
    to_dataset,
    trainer_options,
    warm_start,
    words_of,
)
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.evaluation import Evaluation, evaluate
from vgr_trl.rewards import load_rewards
from vgr_trl.trainer import DAPOTrainer


@dataclass(frozen=True)
class Settings:
    """Of all runs that are compared: of the warm start, of the updates, and how often accuracy is measured.

    Small steps: at equally many tokens 60 of 8 prompts taught as much as 40 of 24, and noise is what credit is against.
    """

    steps: int = 40
    prompts: int = 12
    generations: int = 8
    start: float = 0.45
    measure_every: int = 8
    questions: int = 160


class Start:
    """A task's questions under a seed, and a model that answers some of them; every method starts from a copy."""

    def __init__(
        self, task: Task, seed: int, settings: Settings, *, device: str = "cpu", most: int = 1500, **sizes: int
    ):
        """Draw the questions and warm-start a new model.

        `most`: steps of each part of the warm start. `sizes`: of the model, as `build_tiny_vlm` takes them; the wider,
        the lower its learning rates.
        """
        self.task, self.seed, self.settings = task, seed, settings
        self.options = Options(
            seed=seed,
            steps=settings.steps,
            text_steps=most,
            prompts_per_step=settings.prompts,
            num_generations=settings.generations,
            warm_start_accuracy=settings.start,
            device=device,
        )
        set_up_process(self.options)
        self.questions: Questions = task.questions(seed)
        words = words_of(self.questions.train + self.questions.test)
        self.model: Any
        self.model, self.processor = build_tiny_vlm(words, seed=seed, **sizes)
        self.model.to(device)
        self.pace = 64 / self.model.config.get_text_config().hidden_size
        self._warm_up()
        self.weights = copy.deepcopy(self.model.state_dict())

    def measured(self, step: int, tokens: int, accuracy: float) -> None:
        """Do nothing with a point of a course; for those who want it before the course is over."""

    def _warm_up(self) -> None:
        options, questions, rate = self.options, self.questions, 2e-3 * self.pace
        learn_captions(
            self.model,
            self.processor,
            questions.shown,
            learning_rate=rate,
            target_loss=self.task.caption_loss,
            max_steps=min(600, options.text_steps),
            seed=self.seed,
        )
        learn_answers(
            self.model,
            self.processor,
            questions.text,
            learning_rate=options.text_learning_rate * self.pace,
            batch_size=options.text_batch_size,
            max_steps=options.text_steps,
            target_loss=options.text_loss,
            seed=self.seed,
        )
        warm_start(
            self.model,
            self.processor,
            questions.text,
            accuracy=self._learned,
            target_accuracy=self.settings.start,
            measure_every=20,
            max_steps=min(240, options.text_steps),
            learning_rate=rate,
            seed=self.seed,
        )

    def _learned(self) -> float:
        seen = self.answers(self.questions.validation, samples=4)
        return seen.mean_at_k or 0.0

    def answers(self, rows: Rows, *, samples: int, **options: Any) -> Evaluation:
        """Return the scores of sampled answers to `rows`."""
        settings = {"system_prompt": None, "batch_size": 64, "progress": False}
        return evaluate(
            self.model,
            self.processor,
            rows,
            num_samples=samples,
            max_completion_length=self.task.completion_length,
            **settings | options,
        )

    def run(
        self, method: Method, learning_rate: float, *, closely: bool = True, train: Rows | None = None
    ) -> dict[str, Any]:
        """Train a copy by one method; return its course and what it came to, `closely` with all there is to measure.

        `train`: rows instead of the task's.
        """
        self.model.load_state_dict(self.weights)
        torch.manual_seed(self.seed)
        course = Course(self)
        with tempfile.TemporaryDirectory() as folder:
            trainer = DAPOTrainer(
                model=self.model,
                processing_class=self.processor,
                reward_funcs=load_rewards(["accuracy", "format", *method.rewards]),
                args=trainer_options(
                    self.options,
                    Path(folder),
                    learning_rate=learning_rate,
                    max_completion_length=self.task.completion_length,
                    reward_weights=[1.0, 0.2, *method.rewards.values()],
                    log_completions=False,
                    disable_tqdm=True,
                    rollout_log_steps=0,
                    compute_attention_metrics=False,
                    **method.options_for(self.task, self.processor.tokenizer),
                ),
                train_dataset=to_dataset(train or self.questions.train),
                callbacks=[course],
            )
            trainer.remove_callback(PrinterCallback)
            began = time.process_time()
            trainer.train()
        seconds = time.process_time() - began - course.seconds
        return {
            "course": course.points,
            "CPU seconds per step": round(seconds / self.settings.steps, 3),
            **self.outcome(closely),
        }

    def outcome(self, closely: bool) -> dict[str, Any]:
        """Return what the model answers, and, `closely`, looks at, on the held-out questions."""
        rows = self.questions.test
        seen = self.answers(rows, samples=4)
        answered = {"accuracy": round(seen.mean_at_k or 0.0, 4), **in_thoughts(seen, rows, self.task)}
        if not closely:
            return answered
        blanked = self.answers(rows, samples=4, blank_images=True)
        vgr, dependency = looks(
            self.model, self.processor, rows[: self.settings.questions], self.task.completion_length
        )
        looked = {"blanked": blanked.mean_at_k or 0.0, "late VGR": vgr, "dependency": dependency}
        return answered | {name: round(value, 4) for name, value in looked.items()}


class Course(TrainerCallback):
    """Measures accuracy as training goes on, beside the tokens that were generated for it."""

    def __init__(self, start: Start) -> None:
        """Measure on the first of the held-out questions."""
        self.start, self.points, self.seconds, self.tokens = start, list[tuple[int, int, float]](), 0.0, 0
        self.measure(0)

    def measure(self, step: int) -> None:
        """Add (step, generated tokens, accuracy)."""
        began = time.process_time()
        settings = self.start.settings
        seen = self.start.answers(self.start.questions.test[: settings.questions], samples=4)
        self.points.append((step, self.tokens, round(seen.mean_at_k or 0.0, 4)))
        self.seconds += time.process_time() - began if step else 0.0
        self.start.measured(*self.points[-1])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Count tokens; measure where it is due."""
        settings = self.start.settings
        if logs is None or "completions/mean_length" not in logs:
            return
        self.tokens += round(logs["completions/mean_length"] * settings.prompts * settings.generations)
        if state.global_step % settings.measure_every == 0:
            self.measure(state.global_step)
