"""Run by test_resume.py in one or two processes: a run with a replay buffer and further prompts, or the rest of one."""

import json
import sys
from pathlib import Path

import torch
from support.dealt_completions import generate_by_prompt
from support.trainers import BIG_STEPS, config, moves, prompts, vision_trainer


def sparse_reward(completions, **kwargs):
    """Equal within many groups."""
    return [float(len(completion[0]["content"]) % 3 == 0) for completion in completions]


def run(model_folder, question_file, output, rows_per_process, checkpoint=None):
    """How far weights moved, and what was logged, in the eight steps of a run or of one that is continued."""
    options = config(
        output,
        per_device_train_batch_size=rows_per_process,
        gradient_accumulation_steps=2,
        max_steps=8,
        save_strategy="steps",
        save_steps=4,
        compute_attention_metrics=False,
        replay_buffer_size=4,
        dynamic_sampling="resample",
        dynamic_sampling_max_rounds=1,
        **BIG_STEPS,
    )
    trainer = vision_trainer(model_folder, sparse_reward, options, prompts(question_file))
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return moves(trainer, model_folder), [entry for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":  # in two processes: a run, and the rest of that of one process
    folder, checkpoint = Path(sys.argv[3]), sys.argv[4]
    found = {
        name: run(*sys.argv[1:3], folder / name, 2, checkpoint=start)
        for name, start in (("two", None), ("one-two", checkpoint))
    }
    if torch.distributed.get_rank() == 0:
        torch.save({name: moved for name, (moved, _) in found.items()}, folder / "moves.pt")
        (folder / "history.json").write_text(json.dumps({name: history for name, (_, history) in found.items()}))
