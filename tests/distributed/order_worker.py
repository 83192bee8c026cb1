"""Run by test_order.py in one or two processes: whole runs over three epochs, and the rest of each from checkpoints.

With one argument more it is one run that continues where it can, and is killed at the end of that step (0: never).
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from support.trainers import config, prompts, vision_trainer
from transformers import TrainerCallback

# Options, rows of the data set, steps after which the run is continued.
CASES = {
    "whole batches": ({"per_device_train_batch_size": 8}, 6, (3, 7)),
    "parts of a batch": ({"per_device_train_batch_size": 4, "steps_per_generation": 4}, 8, (3, 18)),
    "windows across batches": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3}, 3, (3, 4),
    ),
    "batches used twice": ({"per_device_train_batch_size": 8, "num_iterations": 2}, 4, (5,)),
    "replay": ({"per_device_train_batch_size": 8, "num_iterations": 2, "replay_buffer_size": 4}, 4, (6,)),
}  # fmt: skip


KILLED = "parts of a batch"


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(data, name: str, folder: Path, checkpoint: str | bool | None = None, kill_at: int = 0) -> dict[str, list]:
    """Prompts in order, losses, and sums of the weights at the end; `data`: the model's folder, the questions' file."""
    options, count, _ = CASES[name]
    seen: list[list[int]] = []

    def coarse_reward(completions, row, **kwargs):
        seen.append(gather_object(row))
        return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]

    rows = prompts(data[1]).select(range(count)).add_column("row", list(range(count)))
    batch = options["per_device_train_batch_size"] // int(os.environ.get("WORLD_SIZE", 1))
    options = config(
        folder,
        max_completion_length=4,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=1,
        compute_attention_metrics=False,
        **{**options, "per_device_train_batch_size": batch},
    )
    trainer = vision_trainer(data[0], coarse_reward, options, rows)
    trainer.add_callback(Kill(kill_at))
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "prompts": seen,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [parameter.double().sum().item() for parameter in trainer.model.parameters()],
    }


def train_all(data, output: Path) -> dict[str, dict]:
    """Whole runs, and the rest of each from its checkpoints."""
    results = {}
    for name, (_, _, steps) in CASES.items():
        folder = output / name.replace(" ", "_")
        results[name] = {"whole": train(data, name, folder / "whole")}
        for step in steps:
            checkpoint = folder / "whole" / f"checkpoint-{step}"
            results[name][str(step)] = train(data, name, folder / f"from-{step}", str(checkpoint))
    return results


def write(results: dict, file: Path) -> None:
    is_main = True
    if torch.distributed.is_initialized():
        is_main = torch.distributed.get_rank() == 0
        torch.distributed.barrier()
    if is_main:
        file.write_text(json.dumps(results))


if __name__ == "__main__":
    data, output = (sys.argv[1], sys.argv[2]), Path(sys.argv[3])
    if len(sys.argv) > 4:
        folder = output / "killed"
        began = any(folder.glob("checkpoint-*"))
        write(train(data, KILLED, folder, began or None, int(sys.argv[4])), output / "killed.json")
    else:
        write(train_all(data, output), output / "results.json")
