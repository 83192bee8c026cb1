"""What perception costs: whole optimizer steps with and without; writes `results/perception.md` and `.json`.

python benchmarks/perception.py --size 768,512,128,8 --repeats 3

Perception is a perturbed image, one more scoring pass, and filter, trajectory scale and entropy penalty made of it.
Steps run in turns in one process: TRL's, ours with nothing measured (`ours`), ours as it is by default, which measures
attention in a pass that ends before the head (`metrics`), with a pass that also gives log-probabilities and entropies,
as other options need it (`scored`), and that with perception; also on the demo's model. The share of a step that
perturbing images takes is measured within the steps. The perception loss, which needs a gradient pass of its own, is
measured apart.

On a GPU: python benchmarks/perception.py --device cuda --shape qwen2.5-vl-3b --dtype bfloat16 --size 1536,1280,384,8
    --checkpointing --skip_demo
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from demo_seeds import describe_machine
from PIL import Image
from sharing_models import Size
from stage_passes import STEPS, command, measure_bytes, measure_seconds, medians, read_flags

from vgr_trl import DAPOTrainer
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.rows import as_dataset, words_of
from vgr_trl.demo.run import draw, set_up_process
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward
from vgr_trl.signals import blacken_patches
from vgr_trl.training import perceive as perceiving

RESULTS = Path(__file__).parent / "results"
COMPARED = ("trl", "ours", "metrics", "scored", "perception", "perception loss")


def main() -> None:
    """Measure the size, then the demo; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="768,512,128,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--demo_steps", type=int, default=30)
    parser.add_argument("--skip_demo", action="store_true")
    parser.add_argument("--only_demo", action="store_true")
    parser.add_argument("--output", default="perception")
    flags, setting = read_flags(parser)
    path = RESULTS / f"{flags.output}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"machine": describe_machine(setting.threads), "setting": asdict(setting), "size": flags.size}
    found["page_faults"] = flags.page_faults
    if not flags.only_demo:
        size, step = Size.parse(flags.size), found.setdefault("step", {})
        if flags.only != "bytes":
            with Perturbing() as perturbing:
                seconds = measure_seconds(setting, size, COMPARED, "step", flags.repeats)
            step |= {"seconds": medians(seconds), "runs": seconds, "perturbing": statistics.median(perturbing.calls)}
            write(path, found)
        if flags.only != "seconds":
            step["bytes"] = measure_bytes(setting, size, COMPARED, "step")
            write(path, found)
    found["blacken"] = blackening()
    write(path, found)
    if not flags.skip_demo:
        found["demo"] = demo(flags.demo_steps)
        write(path, found)


class Perturbing:
    """While active, collects the seconds that each trainer step spends in making perturbed images."""

    def __enter__(self) -> "Perturbing":
        self.calls: list[float] = []
        self.original = perceiving.perturbed_prompts

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            made = self.original(*args, **kwargs)
            self.calls.append(time.perf_counter() - started)
            return made

        perceiving.perturbed_prompts = timed
        return self

    def __exit__(self, *error: Any) -> None:
        perceiving.perturbed_prompts = self.original


def blackening() -> float:
    """Median seconds of blackening patches of an image of 1024 x 1024 pixels."""
    image = Image.new("RGB", (1024, 1024), (90, 120, 30))
    seconds = []
    for seed in range(50):
        started = time.perf_counter()
        blacken_patches(image, seed=seed)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def demo(steps: int) -> dict[str, Any]:
    """Median seconds of the demo's steps, with and without perception, in turns of `steps` steps."""
    options = Options(steps=steps)
    set_up_process(options)
    questions = draw(0)
    seconds: dict[str, list[float]] = {"ours": [], "metrics": [], "perception": []}
    with Perturbing() as perturbing:
        for turn in range(4):
            for name in list(seconds)[:: 1 if turn % 2 else -1]:
                model, processor = build_tiny_vlm(words_of(questions.train), seed=0)
                torch.manual_seed(0)
                with tempfile.TemporaryDirectory() as folder:
                    quiet: dict[str, Any] = {"log_completions": False, "disable_tqdm": True, "reward_weights": [1.0]}
                    quiet["rollout_log_steps"] = 0
                    trainer = DAPOTrainer(
                        model=model,
                        processing_class=processor,
                        reward_funcs=[accuracy_reward],
                        args=trainer_options(options, Path(folder), **quiet, **STEPS[name]),
                        train_dataset=as_dataset(questions.train),
                    )
                    started = time.perf_counter()
                    trainer.train()
                    seconds[name].append((time.perf_counter() - started) / steps)
    return {"seconds": medians(seconds), "runs": seconds, "perturbing": statistics.median(perturbing.calls)}


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the numbers and the table."""
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    setting = ", ".join(f"{name} {value}" for name, value in found["setting"].items())
    memory = "goes back to the system" if found["page_faults"] else "stays with the process"
    lines = [
        "# What perception costs",
        "",
        f"Command: `{command('perception', path, found)}`. Medians of interleaved optimizer steps "
        "(generation, scoring, training of one rollout).",
        "",
        f"{machine}. {setting}. Freed memory {memory}.",
        "",
        "| where | compared | seconds | ratio | goal |",
        "|---|---|---:|---:|---:|",
    ]
    step, size = found.get("step"), found["size"]
    if step and "seconds" in step:
        seconds = step["seconds"]
        pairs = [("perception", "metrics", "≤ 1.15"), ("perception", "scored", ""), ("perception", "ours", "")]
        pairs += [
            ("perception", "trl", "≤ 0.4"),
            ("ours", "trl", ""),
            ("metrics", "trl", ""),
            ("perception loss", "ours", ""),
        ]
        lines += [compared(size, seconds, *pair) for pair in pairs]
        lines.append(share(size, step, seconds["perception"]))
    if "demo" in found:
        lines.append(compared("demo", found["demo"]["seconds"], "perception", "metrics", "≤ 1.20"))
        lines.append(compared("demo", found["demo"]["seconds"], "perception", "ours", ""))
        lines.append(share("demo", found["demo"], found["demo"]["seconds"]["perception"]))
    if "blacken" in found:
        lines.append(f"| 1024 x 1024 pixels | blackening patches | {found['blacken']:.4f} | | ≤ 0.010 |")
    if step and "bytes" in step:
        peaks = ", ".join(f"{name} {value / 1e6:.0f} MB" for name, value in step["bytes"].items())
        lines += ["", f"Peak memory of the step above libraries and model, each in a process of its own: {peaks}."]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def compared(where: str, seconds: dict[str, float], newer: str, other: str, goal: str) -> str:
    """A row of the table."""
    values = f"{seconds[newer]:.3g} / {seconds[other]:.3g}"
    return f"| {where} | {newer} / {other} | {values} | {seconds[newer] / seconds[other]:.3f} | {goal} |"


def share(where: str, found: dict[str, Any], step: float) -> str:
    """The row of what making perturbed images takes."""
    part = found["perturbing"]
    return f"| {where} | perturbing images / step | {part:.4f} / {step:.3g} | {part / step:.4f} | ≤ 0.02 |"


if __name__ == "__main__":
    main()
