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
from datasets import load_dataset
from transformers import Qwen2_5_VLForConditionalGeneration, TrainerCallback

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor

model_folder, question_file, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
processes = int(sys.argv[4])

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


def train(name: str, folder: Path, checkpoint: str | bool | None = None, kill_at: int = 0) -> dict[str, list]:
    options, count, _ = CASES[name]
    prompts: list[list[int]] = []

    def coarse_reward(completions, row, **kwargs):
        prompts.append(gather_object(row))
        return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]

    rows, _ = prepare_rows(load_dataset("parquet", data_files=question_file, split="train"), system_prompt=None)
    rows = rows.select(range(count)).add_column("row", list(range(count)))
    options = {**options, "per_device_train_batch_size": options["per_device_train_batch_size"] // processes}
    config = DAPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=4,
        max_completion_length=4,
        num_train_epochs=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        compute_attention_metrics=False,
        **options,
    )
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    trainer = DAPOTrainer(model, coarse_reward, config, rows, processing_class=load_processor(model_folder))
    trainer.add_callback(Kill(kill_at))
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "prompts": prompts,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [parameter.double().sum().item() for parameter in model.parameters()],
    }


def write(results: dict, name: str) -> None:
    is_main = True
    if torch.distributed.is_initialized():
        is_main = torch.distributed.get_rank() == 0
        torch.distributed.barrier()
    if is_main:
        (output / name).write_text(json.dumps(results))


if __name__ == "__main__":
    if len(sys.argv) > 5:
        folder = output / "killed"
        began = any(folder.glob("checkpoint-*"))
        write(train(KILLED, folder, began or None, int(sys.argv[5])), "killed.json")
        sys.exit()
    results = {}
    for name, (_, _, steps) in CASES.items():
        folder = output / name.replace(" ", "_")
        results[name] = {"whole": train(name, folder / "whole")}
        for step in steps:
            checkpoint = folder / "whole" / f"checkpoint-{step}"
            results[name][str(step)] = train(name, folder / f"from-{step}", str(checkpoint))
    write(results, "results.json")
