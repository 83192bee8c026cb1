"""Whether a long run grows: memory, files, threads, time and logs; writes `results/long_run.md`, `.png` and `.json`.

python benchmarks/long_run.py --steps 1000

The demo with everything on, small batches. Every ten steps the process is sampled. After a quarter of the steps (caches
and the replay buffer fill until then) a line is laid through the means of ten blocks: its slope is given with the
standard error of the fit, and with what it would add in as many steps as the run had.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine
from transformers import PrinterCallback, TrainerCallback

from vgr_trl import DAPOTrainer
from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, think_format_reward, vgr_hard_negative_reward

RESULTS = Path(__file__).parent / "results"
EVERY = 10
BLOCKS = 10
EVERYTHING: dict[str, Any] = {
    "learning_rate": 3e-5,
    "reward_weights": [1.0, 0.2, 0.2],
    "early_reward_weights": [1.0, 1.0, 0.2],
    "token_weights": True,
    "enable_perception_filtering": True,
    "enable_entropy_filtering": True,
    "enable_trajectory_reweighting": True,
    "use_entropy_penalty": True,
    "perception_loss_weight": 0.001,
    "replay_buffer_size": 16,
    "dynamic_sampling": "resample",
    "dynamic_sampling_max_rounds": 1,
    "rollout_log_steps": 10,
    "logging_steps": 10,
    "log_completions": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 16,
    "save_strategy": "steps",
    "save_steps": 100,
    "save_total_limit": 2,
    "disable_tqdm": True,
}
UNITS = {
    "memory": "MB",
    "memory in use": "MB",
    "objects": "",
    "open files": "",
    "threads": "",
    "CPU seconds per step": "s",
    "seconds per step": "s",
    "tokens per step": "",
    "records": "MB",
    "history of logs": "MB",
    "Markdown logs": "MB",
    "output folder": "MB",
}


def main() -> None:
    """Train, and write what was sampled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=4, help="per step, of 4 completions each")
    parser.add_argument("--start", type=float, default=0.3, help="sampled accuracy at which the warm start ends")
    parser.add_argument("--megabytes", type=float, default=1, help="rollout_log_max_megabytes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args()
    samples = run(flags)
    flags.results.mkdir(exist_ok=True)
    found = {"machine": describe_machine(1), "samples": samples}
    (flags.results / "long_run.json").write_text(json.dumps(found, indent=1) + "\n")
    (flags.results / "long_run.md").write_text(report(samples, flags))
    plot(samples, flags.results / "long_run.png")


def run(flags: argparse.Namespace) -> list[dict[str, float]]:
    """Warm the demo's model up and train it; the samples, in order."""
    options = Options(
        steps=flags.steps, prompts_per_step=flags.prompts, num_generations=4, warm_start_accuracy=flags.start
    )
    set_up_process(options)
    questions = draw(0)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=0)
    warm_up(model, processor, questions, options)
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder))
        trainer = DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=[accuracy_reward, vgr_hard_negative_reward, think_format_reward],
            args=trainer_options(options, Path(folder), rollout_log_max_megabytes=flags.megabytes, **EVERYTHING),
            train_dataset=as_dataset(questions.train),
            eval_dataset=as_dataset(questions.test[:16]),
            callbacks=[sampler],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return sampler.samples


class Sampler(TrainerCallback):
    """Looks at the process after every tenth step; evaluations and checkpoints are not in the seconds of a step.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.samples: list[dict[str, float]] = []
        self._folder = folder
        self._began, self._spent, self._tokens = (0.0, 0.0), (0.0, 0.0), 0
        self._history, self._read = 0, 0  # characters of the first so many logs

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clocks."""
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop them, and look."""
        now = time.perf_counter(), time.process_time()
        wall, cpu = (sum(each) - began for *each, began in zip(self._spent, now, self._began, strict=True))
        self._spent = wall, cpu
        if state.global_step % EVERY:
            return
        self._spent = (0.0, 0.0)
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        new, self._read = state.log_history[self._read :], len(state.log_history)
        self._history += sum(len(json.dumps([log], indent=2)) for log in new)
        gc.collect()
        looked = {
            "step": state.global_step,
            "memory": resident_bytes() / 1e6,
            "memory in use": allocated_bytes() / 1e6,
            "objects": len(gc.get_objects()),
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "CPU seconds per step": cpu / EVERY,
            "seconds per step": wall / EVERY,
            "tokens per step": tokens / EVERY,
            "records": size(self._folder / "rollouts") / 1e6,
            "history of logs": self._history / 1e6,
            "logs": len(state.log_history),
            "Markdown logs": size(self._folder / "training_logs") / 1e6,
            "output folder": size(self._folder) / 1e6,
        }
        self.samples.append(looked)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class HeapInfo(ctypes.Structure):
    """What `mallinfo2` of glibc 2.33 or newer returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def allocated_bytes() -> int:
    """Memory that malloc has given out; the rest of what is in RAM is code, small Python objects, and free pieces."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = HeapInfo
    found = ask()
    return found.uordblks + found.hblkhd


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def slope(samples: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """Return change per step and its standard error, of a line through the means of blocks of neighbouring samples.

    Means of blocks are nearly independent where single samples, of memory above all, are not.
    """
    length = max(1, len(samples) // BLOCKS)
    blocks = [samples[start : start + length] for start in range(0, len(samples) - length + 1, length)]
    x = [statistics.mean(sample["step"] for sample in block) for block in blocks]
    y = [statistics.mean(sample[name] for sample in block) for block in blocks]
    fit = statistics.linear_regression(x, y)
    spread = sum((value - statistics.mean(x)) ** 2 for value in x)
    left = sum((fit.intercept + fit.slope * at - value) ** 2 for at, value in zip(x, y, strict=True))
    return fit.slope, (left / (len(blocks) - 2) / spread) ** 0.5


def report(samples: Sequence[Mapping[str, float]], flags: argparse.Namespace) -> str:
    """The table."""
    later, last = samples[len(samples) // 4 :], samples[-1]
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())
    lines = [
        "# A long run",
        "",
        f"Command: `python benchmarks/long_run.py --steps {flags.steps}`",
        "",
        f"{machine}. Other work shared the cores, so CPU seconds say more than seconds.",
        "",
        f"{flags.steps} steps of the demo, {flags.prompts} prompts of 4 completions each, everything on: attention, "
        "hard-negative reward, token weights, perception and entropy filters, perception loss, trajectory scale, "
        f"entropy penalty, replay, resampling, records (bound {flags.megabytes:g} MB), evaluations, checkpoints. "
        f"Sampled every {EVERY} steps; slopes from step {later[0]['step']} on, ± one standard error.",
        "",
        "Memory in use is what malloc has given out; the history of logs, which transformers keeps, is in it. Records "
        "hold `logs.jsonl` too, a line per log. It, Markdown logs and TRL's tables of completions, one per log, have "
        "the bound of the records, each by itself; the output folder also has two checkpoints. The history of logs, "
        f"whole in the `trainer_state.json` of each, has no bound: {last['logs']:.0f} entries at the end, "
        f"{1e6 * last['history of logs'] / last['logs']:.0f} bytes each.",
        "",
        f"| | at step {samples[0]['step']} | at step {later[0]['step']} | at the end | largest "
        f"| change per {flags.steps} steps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, unit in UNITS.items():
        change, error = (flags.steps * value for value in slope(later, name))
        seen = [samples[0][name], later[0][name], last[name], max(sample[name] for sample in samples)]
        cells = [f"{value:.4g} {unit}".strip() if unit else f"{value:.0f}" for value in seen]
        lines.append(f"| {name} | {' | '.join(cells)} | {change:+.3g} ± {error:.2g} {unit}".rstrip() + " |")
    return "\n".join([*lines, "", "![Every tenth step](long_run.png)", ""])


def plot(samples: Sequence[Mapping[str, float]], file: Path) -> None:
    """Four small curves over the steps."""
    import matplotlib.pyplot as plt

    shown = ("memory", "open files", "CPU seconds per step", "records")
    figure, axes = plt.subplots(1, len(shown), figsize=(14, 2.6), layout="constrained")
    for axis, name in zip(axes, shown, strict=True):
        axis.plot([sample["step"] for sample in samples], [sample[name] for sample in samples], linewidth=1)
        axis.set_title(f"{name} [{UNITS[name]}]" if UNITS[name] else name, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    figure.savefig(file, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    main()
