"""Trains a tiny model for two steps with the trackers that are named, and writes what they hold to `held.json`.

python trackers_worker.py FOLDER tensorboard trackio

In a process of its own, because trackio reads its folder, TRACKIO_DIR, from the environment when it is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.trainers import config

from vgr_trl import DAPOTrainer
from vgr_trl.demo.demo import as_dataset, draw_questions, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, vgr_reward

FOLDER = Path(sys.argv[1])
torch.set_num_threads(1)


def main(trackers: list[str]) -> None:
    """Train, then collect the trainer's logs and what each tracker holds."""
    rows = draw_questions(12, seed=0, split="train", multiple_choice=False)
    model, processor = build_tiny_vlm(words_of(rows), hidden_size=32, vision_depth=1)
    options = config(
        FOLDER / "out", max_steps=2, max_completion_length=4, per_device_eval_batch_size=8, eval_strategy="steps",
        eval_steps=2, log_completions=True, num_completions_to_print=0, token_weights=True, replay_buffer_size=2,
        report_to=trackers, project="tiny", run_name="first", trackio_static_space_id=False,
    )  # fmt: skip
    trainer = DAPOTrainer(
        model,
        [accuracy_reward, vgr_reward],
        options,
        as_dataset(rows[:8]),
        eval_dataset=as_dataset(rows[8:]),
        processing_class=processor,
    )
    trainer.train()
    held: dict[str, Any] = {"logs": trainer.state.log_history[:-1]}  # the last is the summary of train()
    if "tensorboard" in trackers:
        held["tensorboard"] = in_tensorboard()
    if "trackio" in trackers:
        held["trackio"] = in_trackio()
    (FOLDER / "held.json").write_text(json.dumps(held))


def in_tensorboard() -> dict[str, list[tuple[int, float]]]:
    """Return step and value of every scalar in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (FOLDER / "out" / "runs").glob("*/events.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def in_trackio() -> list[dict[str, Any]]:
    """Return what was logged of the run, entry by entry."""
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("tiny", "first")


if __name__ == "__main__":
    main(sys.argv[2:])
