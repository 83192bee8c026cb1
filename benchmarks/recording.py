"""What recording costs: the time of a step of the demo with and without it, thread and Markdown included.

    python benchmarks/recording.py [--steps 60] [--json results/recording.json]

Steps of one training are recorded at every step, or not at all, in an order drawn at random in pairs, so that both meet
the same machine. What a step costs is the median of the differences within a pair; with `rollout_log_steps`, only one
of so many steps has that cost.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from vgr_trl import DAPOTrainer
from vgr_trl.config.report import ReportOptions
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.rows import as_dataset, words_of
from vgr_trl.demo.run import draw, set_up_process
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, think_format_reward, vgr_reward


class Alternating(TrainerCallback):
    """Records one of every two steps, whichever comes first, and takes the time of both."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.trainer: Any = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.records = True
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Draw for the first of a pair; the second is the other."""
        done = len(self.seconds[True]) + len(self.seconds[False])
        self.records = not self.records if done % 2 else self.random.random() < 0.5
        self.trainer._recorder.is_on = self.records
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Take the time of the step, and of what its thread has still to write, as if it ran beside nothing."""
        if self.records:
            self.trainer._recorder.sink.flush()
        self.seconds[self.records].append(time.perf_counter() - self.started)


def main() -> None:
    """Train, print what recording costs, and write it to a file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps")
    parser.add_argument("--json", type=Path, help="file for the results")
    flags = parser.parse_args()
    result = measure(flags.steps)
    print(json.dumps(result, indent=2))
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(pairs: int) -> dict[str, float]:
    """Return times in milliseconds, and shares of a step."""
    options = Options(steps=2 * pairs + 4)
    set_up_process(options)
    rows = draw(0).train
    model, processor = build_tiny_vlm(words_of(rows), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_options(
            options, Path(folder), reward_weights=[1.0, 0.2, 0.2], token_weights=True, log_completions=False,
            rollout_log_steps=1, realtime_rollout_logging=True, logging_steps=10_000,
        )  # fmt: skip
        rewards: list[Any] = [accuracy_reward, vgr_reward, think_format_reward]
        trainer = DAPOTrainer(model, rewards, config, as_dataset(rows), processing_class=processor)
        alternating = Alternating()
        alternating.trainer = trainer
        trainer.add_callback(alternating)
        trainer.train()
    on, off = (times[2:] for times in (alternating.seconds[True], alternating.seconds[False]))
    extra = statistics.median(a - b for a, b in zip(on, off, strict=False))
    step = statistics.median(off)
    every = ReportOptions().rollout_log_steps
    return {
        "step_ms": round(1000 * step, 2),
        "recorded_step_adds_ms": round(1000 * extra, 2),
        "share_of_a_recorded_step": round(extra / step, 4),
        "rollout_log_steps_by_default": every,
        "share_of_all_steps_by_default": round(extra / step / every, 4),
        "pairs": len(on),
    }


if __name__ == "__main__":
    main()
