"""One model that reads crops, trained by one method; its answers on pictures of held-out digits."""

import copy
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from mosaics.model import build_model, supervised_loss, teach
from mosaics.task import Row
from transformers import PrinterCallback, TrainerCallback

from teacher.task import Example, as_crops, draw_labelled, draw_reading, draw_rows
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo import Options
from vgr_trl.demo.demo import set_up_process
from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.evaluation import Evaluation, evaluate
from vgr_trl.rewards.functions import accuracy_reward
from vgr_trl.trainer import DAPOTrainer

LARGER, NOISIER = 48, 0.75  # side and noise of pictures unlike those that were trained
TUNING = 100  # seeds from here on choose learning rates and group sizes, and measure nothing else


@dataclass(frozen=True)
class Method:
    """A contender.

    Attributes:
        options: of `DAPOConfig`.
        columns: column of the trainer's data -> column of the rows, where they differ.
        labels: whether it is supervised training on labels, the ceiling.
        trains: False for the start itself.
    """

    options: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: bool = False
    trains: bool = True


VPPO = {
    "enable_perception_filtering": True,
    "top_p_perception_tokens": 0.4,
    "enable_trajectory_reweighting": True,
    "trajectory_scaling_min": 0.9,
    "patch_size": 4,
}
PAPO = {
    "perception_loss_weight": 0.01,
    "der_loss_weight1": 0.03,
    "der_loss_weight2": 0.03,
    "black_prob": 0.6,
    "patch_size": 4,
}


def taught(
    learns: str,
    reward: float = 0.0,
    columns: Mapping[str, str] | None = None,
    weights: str = "reference",
    **numbers: Any,
) -> Method:
    """Return a method whose teacher sees the digit's part, or what `columns` put in its place.

    Args:
        learns: `teacher_divergence`, or the rule of credit.
        reward: weight of the verified reward.
        columns: as `Method` has them; with `teacher_images` the teacher sees this image, with `privileged_context` it
            reads this text.
        weights: of the teacher: those of the start, or the policy's.
        numbers: options of the plug-ins.
    """
    columns = columns or {}
    view = next((each for each in ("teacher_images", "privileged_context") if each in columns), "crop_to_box")
    margin = {"crop_margin": 0.0} if view == "crop_to_box" else {}
    options = {"teacher_view": view, "teacher_weights": weights, "reward_weights": [reward]}
    kind = "loss_terms" if learns == "teacher_divergence" else "credit_rules"
    return Method({**options, kind: [learns], "plugin_options": margin | numbers}, columns)


SWEEP = {
    f"plain, {rate:g}, {size}": Method({"learning_rate": rate, "num_generations": size})
    for rate, size in ((1e-4, 8), (2e-4, 8), (5e-4, 8), (1e-3, 8), (5e-4, 32), (2e-4, 32))
}
METHODS = {
    "plain": Method(),
    "plain, 240 steps": Method({"max_steps": 240}),  # about as many positions as a method with a teacher in 80
    "divergence": taught("teacher_divergence"),
    "labels": Method(labels=True),
    "divergence, reward": taught("teacher_divergence", 1.0),
    "distil": taught("distil", 1.0, distil_coef=0.3),
    "rlsd": taught("rlsd", 1.0),
    "divergence, another part": taught("teacher_divergence", columns={"bbox": "elsewhere"}),
    "divergence, same picture": taught("teacher_divergence", columns={"teacher_images": "image"}),
    "VPPO": Method(VPPO),
    "PAPO": Method(PAPO),
    "distil, no reward": taught("distil"),
    "divergence, another digit": taught("teacher_divergence", columns={"teacher_images": "alike"}),
    "divergence, policy's weights": taught("teacher_divergence", weights="policy"),
    "divergence, forward": taught("teacher_divergence", teacher_divergence_kind="forward"),
}


@dataclass(frozen=True)
class Settings:
    """Of all runs that are compared."""

    reading_steps: int = 400
    test_rows: int = 400
    course_rows: int = 200
    steps: int = 80
    prompts: int = 24
    generations: int = 8
    learning_rate: float = 5e-4


class Start:
    """A model of a seed that reads crops; every method starts from a copy.

    Attributes:
        tokens: longest answer, in tokens.
        device: of the model.
        task: name of the task; empty for the first.
        taught: seed of the model that all seeds start from; None: each has its own.
    """

    tokens, device, task = 6, "cpu", ""
    taught: int | None = None

    def __init__(self, seed: int, settings: Settings, folder: Path) -> None:
        """Draw pictures, and teach a new model or load it from `folder`."""
        self.seed, self.settings = seed, settings
        set_up_process(Options(seed=seed))
        self.train = self.draw_rows(settings.steps * settings.prompts, seed=seed, split="train")
        self.test = self.draw_rows(settings.test_rows, seed=TUNING if seed >= TUNING else 0, split="test")
        own = seed if self.taught is None else self.taught
        self.model, self.processor = self.build(own)
        file = folder / f"seed-{own}-{settings.reading_steps}.pt"
        if file.exists():
            self.model.load_state_dict(torch.load(file, map_location=self.device))
        else:
            self.warm_up(self.draw_rows(20 * settings.reading_steps, seed=own + 1000, split="train"))
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), file)
        self.weights = copy.deepcopy(self.model.state_dict())

    def draw_rows(self, count: int, **options: Any) -> list[Row]:
        """Draw pictures with their questions."""
        return draw_rows(count, **options)

    def build(self, seed: int) -> tuple[Any, Any]:
        """Return an untrained model and its processor."""
        model, processor = build_model(seed, self.texts())
        processor.image_processor.size = {"shortest_edge": 16, "longest_edge": LARGER**2}
        return model, processor

    def texts(self) -> list[str]:
        """Return further texts of the task, of which each word becomes a token."""
        return []

    def warm_up(self, rows: list[Row]) -> None:
        """Teach to read crops."""
        steps = self.settings.reading_steps
        teach(self.model, self.processor, rows, draw_reading, steps=steps, rate=2e-3, seed=self.seed)

    def label(self, row: Row, rng: random.Random) -> Example:
        """Return the whole picture with its answer."""
        return draw_labelled(row, rng)

    def loss(self, examples: list[Example]) -> torch.Tensor:
        """Return the supervised loss."""
        return supervised_loss(self.model, self.processor, examples)

    def suppressed(self) -> list[int]:
        """Return tokens that are not sampled.

        A policy this small now and then writes a token of images or videos, with which no pass can be made.
        """
        vision = [token for token in SPECIAL_TOKENS if "vision" in token or token.endswith("_pad|>")]
        tokens: list[int] = self.processor.tokenizer.convert_tokens_to_ids(vision)
        return tokens

    def answers(self, rows: list[Row], samples: int = 0) -> Evaluation:
        """Return the scores of greedy and sampled answers to rows."""
        given: dict[str, Any]
        given = {"system_prompt": None, "batch_size": 100, "progress": False, "max_completion_length": self.tokens}
        return evaluate(self.model, self.processor, rows, num_samples=samples, **given)

    def run(self, method: Method) -> dict[str, Any]:
        """Train a copy by one method; return its course and what it came to."""
        self.model.load_state_dict(self.weights)
        torch.manual_seed(self.seed)
        course = Course(self)
        began, cpu = time.monotonic(), time.process_time()
        with course.counting(self.model):
            if method.trains:
                (self.supervise if method.labels else self.reinforce)(method, course)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu - course.cpu
        steps = method.options.get("max_steps", self.settings.steps)
        times = {"seconds": round(seconds, 1), "CPU seconds per step": round(cpu / steps, 3)}
        return {"course": course.points, "rewards": course.rewards, **self.outcome(), **times}

    def scores(self, count: int) -> list[float]:
        """Return what a course measures, on so many held-out pictures: the accuracy first."""
        return [self.answers(self.test[:count]).accuracy]

    def outcome(self) -> dict[str, float]:
        """Return the accuracy on held-out pictures, on their digits' parts, and on pictures unlike the trained ones."""
        seen, count = self.answers(self.test, samples=2), self.settings.course_rows
        measured = {
            "accuracy": seen.accuracy,
            "sampled": seen.mean_at_k or 0.0,
            "unanswered": seen.unparsable,
            "crop": self.answers(as_crops(self.test[:count])).accuracy,
            "larger": self.answers(self.draw_rows(count, seed=0, split="test", side=LARGER)).accuracy,
            "noisier": self.answers(self.draw_rows(count, seed=0, split="test", noise=NOISIER)).accuracy,
        }
        return {name: round(value, 4) for name, value in measured.items()}

    def supervise(self, method: Method, course: "Course") -> None:
        """Train on labels, a batch of prompts at a time, with the optimizer and rate of the others."""
        count, rng = self.settings.prompts, random.Random(self.seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate, weight_decay=0.0)
        self.model.train()
        for step in range(1, self.settings.steps + 1):
            rows = self.train[(step - 1) * count : step * count]
            loss = self.loss([self.label(row, rng) for row in rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            course.measure_if_due(step)

    def reinforce(self, method: Method, course: "Course") -> None:
        """Train by `DAPOTrainer`."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(method, Path(folder), callbacks=[course])
            with course.counting(trainer.ref_model) if trainer.ref_model is not None else nullcontext():
                trainer.train()
            if trainer.state.global_step < self.settings.steps:
                raise InterruptedError(f"Training ended at step {trainer.state.global_step}: run it again.")

    def rows_of(self, method: Method) -> list[Row]:
        """Return as many pictures as the method takes, so that it sees none twice."""
        if (steps := method.options.get("max_steps")) is None:
            return self.train
        return self.draw_rows(steps * self.settings.prompts, seed=self.seed, split="train")

    def trainer(self, method: Method, folder: Path, **given: Any) -> DAPOTrainer:
        """Return the trainer of a method."""
        settings = self.settings
        generations = method.options.get("num_generations", settings.generations)
        options: dict[str, Any] = {
            "output_dir": str(folder), "seed": self.seed, "max_steps": settings.steps, "bf16": False,
            "use_cpu": self.device == "cpu",
            "per_device_train_batch_size": settings.prompts * generations, "num_generations": generations,
            "max_completion_length": self.tokens, "learning_rate": settings.learning_rate, "warmup_steps": 3,
            "lr_scheduler_type": "constant_with_warmup", "gradient_checkpointing": False, "logging_steps": 1,
            "reward_weights": [1.0], "rollout_log_steps": 0,
            "generation_kwargs": {"suppress_tokens": self.suppressed()},
            "compute_attention_metrics": False, "check_pixels": False, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        self.model.save_pretrained(folder / "start")  # from which TRL loads the reference, as a teacher
        self.model.config._name_or_path = str(folder / "start")
        trainer = DAPOTrainer(
            model=self.model,
            processing_class=self.processor,
            reward_funcs=[accuracy_reward],
            args=DAPOConfig(**options | method.options),
            train_dataset=to_dataset(self.rows_of(method), method),
            **given,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def to_dataset(rows: list[Row], method: Method) -> Dataset:
    """Return the rows as a data set with the columns that trainer, reward and view read."""
    columns = {name: name for name in ("prompt", "image", "solution", "bbox")} | dict(method.columns)
    picked = [{name: row[column] for name, column in columns.items()} for row in rows]
    for row in picked:
        if "teacher_images" in row:
            row["teacher_images"] = [row["teacher_images"]]
    data = Dataset.from_list(picked)
    return data.cast_column("teacher_images", List(Image())) if "teacher_images" in columns else data


class Course(TrainerCallback):
    """Measures accuracy after each quarter, beside the positions that training computed until then.

    A position is a token of a row, padding included, in one forward pass of the language model; in a pass with
    gradients it counts three times.
    """

    def __init__(self, start: Start) -> None:
        """Measure the start."""
        self.start, self.positions, self.counts, self.cpu = start, 0, False, 0.0
        self.points: list[tuple[float, ...]] = []  # of (step, positions, scores)
        self.rewards: list[float] = []
        self.measure(0)

    @contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Count the positions of a model's passes."""
        hook = model.get_decoder().layers[0].register_forward_pre_hook(self.count, with_kwargs=True)
        self.counts = True
        try:
            yield
        finally:
            hook.remove()

    def count(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count those of a pass, unless it measures accuracy."""
        hidden = given[0] if given else named["hidden_states"]
        if self.counts:
            self.positions += hidden.shape[:-1].numel() * (3 if torch.is_grad_enabled() else 1)

    def measure(self, step: int) -> None:
        """Add a point; the CPU time of that is no training's."""
        counts, self.counts = self.counts, False
        began, scores = time.process_time(), self.start.scores(self.start.settings.course_rows)
        self.points.append((step, self.positions, *(round(score, 4) for score in scores)))
        self.counts = counts
        self.cpu += time.process_time() - began if step else 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the reward."""
        if logs is None or "rewards/accuracy_reward/mean" not in logs:
            return
        self.rewards.append(round(logs["rewards/accuracy_reward/mean"], 3))
        self.measure_if_due(state.global_step)

    def measure_if_due(self, step: int) -> None:
        """Measure after each quarter."""
        if step % max(self.start.settings.steps // 4, 1) == 0:
            self.measure(step)
