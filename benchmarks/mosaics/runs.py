"""One model that can call the tool and read, trained by one method, and what it does on new digits."""

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import PrinterCallback

from mosaics.model import BOXES, OPEN, build_model, draw_call, draw_example, draw_reading, teach
from mosaics.task import Row, draw_rows, is_box, overlap
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo import Options
from vgr_trl.demo.demo import set_up_process
from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.rewards.answers import completion_text
from vgr_trl.rewards.functions import accuracy_reward, tool_cost
from vgr_trl.tools import Zoom
from vgr_trl.trainer import DAPOTrainer

CONTROLS = Path(__file__).with_name("controls.py")


@dataclass(frozen=True)
class Method:
    """A contender.

    Attributes:
        zoom: whether it has the tool.
        options: what it changes of the options of `DAPOConfig`.
        knows: the tokens that its rule of credit is told of: those that decide `where` to look, or of `digits` as well.
    """

    zoom: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    knows: Literal["where", "digits"] | None = None


METHODS = {
    "without the tool": Method(zoom=False),
    "plain": Method(),
    "VPPO": Method(
        options={
            "enable_perception_filtering": True,
            "top_p_perception_tokens": 0.4,
            "enable_trajectory_reweighting": True,
            "trajectory_scaling_min": 0.9,
        }
    ),
    "VGR": Method(options={"token_weights": True}),
    "oracle": Method(options={"credit_rules": [f"{CONTROLS}:oracle"]}, knows="where"),
    "oracle, digits": Method(options={"credit_rules": [f"{CONTROLS}:oracle"]}, knows="digits"),
    "random": Method(options={"credit_rules": [f"{CONTROLS}:at_random"]}, knows="where"),
    "plain, scaled": Method(options={"scale_rewards": "group"}),
}


@dataclass(frozen=True)
class Settings:
    """Of all runs that are compared."""

    reading_steps: int = 350
    text_steps: int = 300
    call_steps: int = 300
    train_rows: int = 1500
    test_rows: int = 400
    steps: int = 60
    prompts: int = 12
    generations: int = 8
    learning_rate: float = 5e-4
    cost: float = 0.05


class Watch:
    """A reward of weight 0 that notes completions and the columns of their rows."""

    __name__ = "watch"

    def __init__(self) -> None:
        """Have seen nothing."""
        self.seen: list[dict[str, Any]] = []

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Note them; return the overlap of the last box with the truth, 0 where there is none."""
        new = []
        for index, completion in enumerate(completions):
            row = {name: columns[name][index] for name in ("solution", "box", "grid")}
            calls = [call["function"] for message in completion for call in message.get("tool_calls") or ()]
            boxes = [box for call in calls if is_box(box := call["arguments"].get("box"))]
            new.append(row | {"text": completion_text(completion), "calls": len(calls), "boxes": boxes})
        self.seen += new
        return [overlap(each["boxes"][-1], each["box"]) if each["boxes"] else 0.0 for each in new]


class Start:
    """A model of a seed that calls and reads; every method starts from a copy."""

    def __init__(self, seed: int, settings: Settings) -> None:
        """Draw digits and teach a new model."""
        self.seed, self.settings = seed, settings
        set_up_process(Options(seed=seed))
        self.train = draw_rows(settings.train_rows, seed=seed, split="train")
        self.test = draw_rows(settings.test_rows, seed=seed, split="test")
        self.model, self.processor = build_model(seed)
        for draw, steps, rate in (
            (draw_reading, settings.reading_steps, 2e-3),
            (draw_call, settings.text_steps, 1.5e-3),
            (draw_example, settings.call_steps, 1.5e-3),
        ):
            teach(self.model, self.processor, self.train, draw, steps=steps, rate=rate, seed=seed)
        self.weights = copy.deepcopy(self.model.state_dict())

    def run(self, method: Method) -> dict[str, Any]:
        """Train a copy by one method; return what it does before and after, and how long that took."""
        self.model.load_state_dict(self.weights)
        settings, watch = self.settings, Watch()
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(method, watch, Path(folder))
            before = evaluate(trainer, watch)
            began, cpu = time.monotonic(), time.process_time()
            trainer.train()
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
            after = evaluate(trainer, watch)
        course = [
            [log["rewards/accuracy_reward/mean"], log.get("rewards/watch/mean", 0.0)]
            for log in trainer.state.log_history
            if "rewards/accuracy_reward/mean" in log
        ]
        times = {"seconds": round(seconds, 1), "CPU seconds per step": round(cpu / settings.steps, 3)}
        return {"before": before, **after, **times, "course": [[round(v, 3) for v in point] for point in course]}

    def trainer(self, method: Method, watch: Watch, folder: Path, **changed: Any) -> DAPOTrainer:
        """Return the trainer of a method."""
        settings, plugin = self.settings, {}
        if method.knows is not None:
            plugin = {"plugin_options": decision_ids(self.processor.tokenizer, digits=method.knows == "digits")}
        batch = settings.prompts * settings.generations
        # A policy this small now and then writes a token of images or videos, with which no pass can be made.
        vision = [token for token in SPECIAL_TOKENS if "vision" in token or token.endswith("_pad|>")]
        suppressed = self.processor.tokenizer.convert_tokens_to_ids(vision)
        rewards: list[Any] = [accuracy_reward, watch, *([tool_cost] if method.zoom else [])]
        options: dict[str, Any] = {
            "output_dir": str(folder), "seed": self.seed, "max_steps": settings.steps, "bf16": False, "use_cpu": True,
            "per_device_train_batch_size": batch, "num_generations": settings.generations,
            "per_device_eval_batch_size": 128, "num_generations_eval": 1,
            "max_completion_length": 48, "learning_rate": settings.learning_rate, "warmup_steps": 3,
            "lr_scheduler_type": "constant_with_warmup", "gradient_checkpointing": False, "logging_steps": 1,
            "reward_weights": [1.0, 0.0, settings.cost][: len(rewards)], "scale_rewards": "none",
            "rollout_log_steps": 0, "generation_kwargs": {"suppress_tokens": suppressed},
            "compute_attention_metrics": False, "check_pixels": False, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "dataloader_pin_memory": False,
            "max_tool_calling_iterations": 2 if method.zoom else None,
        }  # fmt: skip
        trainer = DAPOTrainer(
            model=self.model,
            processing_class=self.processor,
            reward_funcs=rewards,
            args=DAPOConfig(**options | method.options | plugin | changed),
            train_dataset=to_dataset(self.train),
            eval_dataset=to_dataset(self.test),
            environment_factory=Zoom if method.zoom else None,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def decision_ids(tokenizer: Any, digits: bool = False) -> dict[str, list[int]]:
    """Return the options of the controls: the tokens that decide what is seen and, with `digits`, what is answered."""
    known = [OPEN, "<answer>", *BOXES, *(map(str, range(10)) if digits else ())]
    return {"decisive_ids": tokenizer.convert_tokens_to_ids(known)}


def to_dataset(rows: Sequence[Row]) -> Dataset:
    """Return the rows as a data set with the columns that trainer, tool and rewards read."""
    names = ("prompt", "image", "solution", "box", "grid")
    return Dataset.from_list([{name: row[name] for name in names} for row in rows])


def evaluate(trainer: DAPOTrainer, watch: Watch) -> dict[str, float]:
    """Return what the model does on the held-out rows, one sampled answer each.

    accuracy: of all; `mosaics`, `singles`: of rows with many digits and with one. calls, calls_singles: per answer, of
    mosaics and singles. overlap: of a mosaic's last box with the truth; hits: share of those above 0.5; 0 without one.
    """
    watch.seen.clear()
    torch.manual_seed(0)
    trainer.evaluate()
    seen, watch.seen = watch.seen, []
    right = accuracy_reward([each["text"] for each in seen], [each["solution"] for each in seen])
    pairs = [(each, float(value or 0)) for each, value in zip(seen, right, strict=True)]
    mosaics, singles = [[pair for pair in pairs if (pair[0]["grid"] > 1) is many] for many in (True, False)]
    boxes = [overlap(each["boxes"][-1], each["box"]) for each, _ in mosaics if each["boxes"]]
    found = {
        "accuracy": fmean(value for _, value in pairs),
        "mosaics": fmean(value for _, value in mosaics),
        "singles": fmean(value for _, value in singles),
        "calls": fmean(each["calls"] for each, _ in mosaics),
        "calls_singles": fmean(each["calls"] for each, _ in singles),
        "overlap": fmean(boxes or [0.0]),
        "hits": fmean([value > 0.5 for value in boxes] or [0.0]),
    }
    return {name: round(value, 4) for name, value in found.items()}
