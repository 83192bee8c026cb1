"""What the replay buffer costs where no group is dead; writes `results/replay_overhead.md` and `.json`.

python benchmarks/replay_overhead.py --turns 6 --steps 40

The demo's model trains with and without a buffer of 64 groups, in turns, with a reward that differs between the
completions of every prompt: groups enter the buffer, none is replaced. Beside the seconds of whole steps, which vary by
more than the buffer takes, the time inside the choice of groups is measured.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_seeds import describe_machine
from transformers import TrainerCallback

from vgr_trl import DAPOTrainer
from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process
from vgr_trl.demo.tiny_vlm import build_tiny_vlm

RESULTS = Path(__file__).parent / "results"
BUFFER: dict[str, dict[str, Any]] = {"without": {}, "with": {"replay_buffer_size": 64}}


def main() -> None:
    """Train in turns, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    flags = parser.parse_args()
    options = Options(steps=flags.steps)
    set_up_process(options)
    questions = draw(0)
    steps: dict[str, list[float]] = {name: [] for name in BUFFER}
    choosing: dict[str, list[float]] = {name: [] for name in BUFFER}
    replaced: list[float] = []
    for turn in range(flags.turns):
        for name in list(BUFFER)[:: 1 if turn % 2 else -1]:
            model, processor = build_tiny_vlm(words_of(questions.train), seed=0)
            torch.manual_seed(turn)
            clock = Clock()
            with tempfile.TemporaryDirectory() as folder:
                quiet: dict[str, Any] = {"log_completions": False, "disable_tqdm": True, "rollout_log_steps": 0}
                quiet |= {"logging_steps": 1, "reward_weights": [1.0]}
                trainer = DAPOTrainer(
                    model=model,
                    processing_class=processor,
                    reward_funcs=[differing_reward],
                    args=trainer_options(options, Path(folder), **quiet, **BUFFER[name]),
                    train_dataset=as_dataset(questions.train),
                    callbacks=[clock],
                )
                clock.watch(trainer)
                trainer.train()
            steps[name] += clock.steps[2:]
            choosing[name] += clock.choosing[2:]
            logged = trainer.state.log_history
            replaced += [entry["replay/replaced_fraction"] for entry in logged if "replay/replaced_fraction" in entry]
    machine = describe_machine(1)
    found = {"machine": machine, "steps": steps, "choosing": choosing, "replaced_fraction": max(replaced)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "replay_overhead.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "replay_overhead.md").write_text(report(found, flags))


def differing_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Another value for every completion of a rollout, so that no group is dead."""
    return [sum(ids) % 17 + row / 1000 for row, ids in enumerate(completion_ids)]


class Clock(TrainerCallback):
    """Seconds of every optimizer step, and of the choice of groups within it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.choosing: list[float] = []
        self.started = 0.0

    def watch(self, trainer: Any) -> None:
        """Time what the trainer calls of its choice of groups."""
        choice = trainer.stages.choice
        choice.choose = self._timed(choice.choose)
        if choice.replay is not None:
            choice.replay.first_pass = self._timed(choice.replay.first_pass)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            made = call(*args, **kwargs)
            self.choosing[-1] += time.perf_counter() - started
            return made

        return timed

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()
        self.choosing.append(0.0)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(time.perf_counter() - self.started)


def report(found: dict[str, Any], flags: Any) -> str:
    """The table."""
    medians = {name: statistics.median(values) for name, values in found["steps"].items()}
    inside = {name: statistics.median(values) for name, values in found["choosing"].items()}
    extra = inside["with"] - inside["without"]
    return "\n".join(
        [
            "# What the replay buffer costs where no group is dead",
            "",
            f"Command: `python benchmarks/replay_overhead.py --turns {flags.turns} --steps {flags.steps}`",
            "",
            ", ".join(f"{name} {value}" for name, value in found["machine"].items()) + ".",
            "",
            f"The demo's model, {len(found['steps']['with'])} steps with a buffer of 64 groups and as many without, in "
            f"turns. Fraction of groups replaced: {found['replaced_fraction']:.3f}. Goal: 1 % of the step.",
            "",
            "| | with | without | |",
            "|---|---:|---:|---:|",
            f"| median step, seconds | {medians['with']:.4f} | {medians['without']:.4f} "
            f"| ratio {medians['with'] / medians['without']:.4f} |",
            f"| inside the choice of groups, seconds | {inside['with']:.5f} | {inside['without']:.5f} "
            f"| {extra / medians['without']:.2%} of the step |",
            "",
        ]
    )


if __name__ == "__main__":
    main()
