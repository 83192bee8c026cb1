"""What recording costs: CPU seconds of a recorded step of the demo, counted where they are spent.

    python benchmarks/recording.py [--steps 12] [--hidden 64] [--json results/recording.json]

Counted are the CPU time of the training thread in the recorder and in what it adds to the scoring pass (attention token
by token, and the head, for recorded rows), and that of the thread that writes; all as shares of the CPU time of a step
that is not recorded. Other programs on the machine do not enter CPU time, as they would the time on the wall.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback
from trl.kernels import ChunkedLogProbFunction

from vgr_trl import DAPOTrainer
from vgr_trl.config.stages.report import ReportOptions
from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, think_format_reward, vgr_reward
from vgr_trl.signals import AttentionProbe

IN_THE_STEP = ("rows_due", "keep", "write")


class Alternating(TrainerCallback):
    """Records one of every two steps, whichever comes first, and takes the CPU time of both."""

    def __init__(self, trainer: Any, seed: int = 0) -> None:
        self.trainer, self.random = trainer, random.Random(seed)
        self.records = True
        self.steps: list[tuple[bool, dict[str, float]]] = []
        self.spent: dict[str, float] = defaultdict(float)
        self.started = 0.0
        recorder = trainer.stages.recorder
        for name in IN_THE_STEP:
            setattr(recorder, name, self._timed("recorder", getattr(recorder, name)))
        put = recorder.sink._background.put
        recorder.sink._background.put = lambda job: put(self._timed("writer", job))
        probe, kernel, score = cast(Any, AttentionProbe), cast(Any, ChunkedLogProbFunction), trainer.host.score
        probe._keep_map = self._timed("pass", probe._keep_map)
        plain, self.in_score = kernel.forward, False
        timed = self._timed("pass", plain)
        kernel.forward = staticmethod(lambda *args: (timed if self.in_score else plain)(*args))

        def scored(*args: Any, **kwargs: Any) -> Any:
            self.in_score = True
            try:
                return score(*args, **kwargs)
            finally:
                self.in_score = False

        trainer.host.score = scored

    def _timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[what] += time.thread_time() - started

        return timed

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Draw for the first of a pair; the second is the other."""
        self.records = not self.records if len(self.steps) % 2 else self.random.random() < 0.5
        self.trainer.stages.recorder.is_on = self.records
        self.spent.clear()
        self.started = time.thread_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the writing thread, too."""
        self.spent["step"] = time.thread_time() - self.started
        self.trainer.stages.recorder.sink.flush()
        self.steps.append((self.records, dict(self.spent)))


def main() -> None:
    """Train, print what recording costs, and write it to a file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="pairs of steps")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model, a multiple of 16")
    parser.add_argument("--json", type=Path, help="file for the results")
    flags = parser.parse_args()
    result = measure(flags.steps, flags.hidden)
    print(json.dumps(result, indent=2))
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(pairs: int, hidden_size: int = 64) -> dict[str, float]:
    """Return CPU times in milliseconds, and shares of a step."""
    options = Options(steps=2 * pairs + 2)
    set_up_process(options)
    rows = draw(0).train
    model, processor = build_tiny_vlm(words_of(rows), seed=0, hidden_size=hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_options(
            options, Path(folder), reward_weights=[1.0, 0.2, 0.2], token_weights=True, log_completions=False,
            rollout_log_steps=1, realtime_rollout_logging=True, logging_steps=10_000,
        )  # fmt: skip
        rewards: list[Any] = [accuracy_reward, vgr_reward, think_format_reward]
        trainer = DAPOTrainer(model, rewards, config, as_dataset(rows), processing_class=processor)
        alternating = Alternating(trainer)
        trainer.add_callback(alternating)
        trainer.train()
    steps = alternating.steps[2:]
    on, off = ([spent for recorded, spent in steps if recorded is which] for which in (True, False))
    step = statistics.median(spent["step"] for spent in off)
    recorder = statistics.median(spent["recorder"] for spent in on)
    writer = statistics.median(spent["writer"] for spent in on)
    longer = statistics.median(spent["pass"] for spent in on)
    every = ReportOptions().rollout_log_steps
    return {
        "hidden_size": hidden_size,
        "step_ms": round(1000 * step, 2),
        "recorder_ms": round(1000 * recorder, 2),
        "in_the_pass_ms": round(1000 * longer, 2),
        "writer_ms": round(1000 * writer, 2),
        "share_in_the_step": round((recorder + longer) / step, 4),
        "share_with_the_writer": round((recorder + longer + writer) / step, 4),
        "rollout_log_steps_by_default": every,
        "share_of_all_steps_by_default": round((recorder + longer + writer) / step / every, 4),
        "pairs": len(on),
    }


if __name__ == "__main__":
    main()
