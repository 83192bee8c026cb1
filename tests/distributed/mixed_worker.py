"""Run by test_mixed_rows.py in two processes: rows with an image on one, rows without on the other."""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import Qwen2_5_VLForConditionalGeneration

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor

model_folder, question_file, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


rows, _ = prepare_rows(load_dataset("parquet", data_files=question_file, split="train"), system_prompt=None)
names = rows.column_names
questions = [{name: rows[index][name] for name in names} for index in range(4)]
for index in (1, 2):
    questions[index] |= {name: None for name in names if name in ("image", "images")}
rows = type(rows).from_list(questions, rows.features)
config = DAPOConfig(
    output_dir=str(output),
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=4,
    max_steps=2,
    shuffle_dataset=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    log_completions=True,
    num_completions_to_print=0,
)
model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
trainer = DAPOTrainer(model, length_reward, config, rows, processing_class=load_processor(model_folder))
tables = []
original = trainer.log


def log(logs, *rest):
    tables.append([len(images) for images in trainer._logs["images"]])
    original(logs, *rest)


trainer.log = log
trainer.train()
if trainer.accelerator.is_main_process:
    (output / "tables.json").write_text(json.dumps(tables))
