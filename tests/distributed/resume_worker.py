"""Run by test_resume.py in one or two processes: a run with a replay buffer and further prompts, or the rest of one."""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from dealt_completions import generate_by_prompt
from transformers import Qwen2_5_VLForConditionalGeneration

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor

model_folder, question_file, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rows_per_process, last_step, checkpoint = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] if len(sys.argv) > 6 else None


def sparse_reward(completions, **kwargs):
    """Equal within many groups."""
    return [float(len(completion[0]["content"]) % 3 == 0) for completion in completions]


rows, _ = prepare_rows(load_dataset("parquet", data_files=question_file, split="train"), system_prompt=None)
processor = load_processor(model_folder)
config = DAPOConfig(
    output_dir=str(output),
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=rows_per_process,
    num_generations=4,
    gradient_accumulation_steps=2,
    max_completion_length=64,
    max_steps=last_step,
    learning_rate=0.05,
    optim="sgd",
    max_grad_norm=1e9,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="steps",
    save_steps=4,
    report_to="none",
    disable_tqdm=True,
    compute_attention_metrics=False,
    replay_buffer_size=4,
    dynamic_sampling="resample",
    dynamic_sampling_max_rounds=1,
)
model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
trainer = DAPOTrainer(model, sparse_reward, config, rows, processing_class=processor)
trainer.model.generate = generate_by_prompt(trainer, processor)
trainer.train(resume_from_checkpoint=checkpoint)
if trainer.accelerator.is_main_process:
    start = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    before, after = (
        torch.cat([parameter.detach().flatten() for parameter in each.parameters()]) for each in (start, model)
    )
    torch.save(after - before, output / "moves.pt")
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    (output / "history.json").write_text(json.dumps(history))
