"""Trains a tiny model for two steps with trackio, and writes what it holds to `held.json`.

python trackers_worker.py FOLDER

In a process of its own, because trackio reads its folder, TRACKIO_DIR, from the environment when it is imported.
"""

import json
import sys
from pathlib import Path

import torch
from support.trainers import config

from vgr_trl import DAPOTrainer
from vgr_trl.demo.demo import as_dataset, draw_questions, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, vgr_reward

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    rows = draw_questions(12, seed=0, split="train", multiple_choice=False)
    model, processor = build_tiny_vlm(words_of(rows), hidden_size=32, vision_depth=1)
    options = config(
        folder / "out", max_steps=2, max_completion_length=4, per_device_eval_batch_size=8, eval_strategy="steps",
        eval_steps=2, log_completions=True, num_completions_to_print=0, token_weights=True, replay_buffer_size=2,
        report_to=["trackio"], project="tiny", run_name="first", trackio_static_space_id=False,
    )  # fmt: skip
    train, evaluated, rewards = as_dataset(rows[:8]), as_dataset(rows[8:]), [accuracy_reward, vgr_reward]
    trainer = DAPOTrainer(model, rewards, options, train, eval_dataset=evaluated, processing_class=processor)
    trainer.train()
    from trackio.sqlite_storage import SQLiteStorage

    # The last of the logs is the summary of train().
    held = {"logs": trainer.state.log_history[:-1], "trackio": SQLiteStorage.get_logs("tiny", "first")}
    (folder / "held.json").write_text(json.dumps(held))
