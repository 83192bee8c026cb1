"""What test_recording.py runs in one process and in two: two steps that are recorded, and an evaluation."""

from support.dealt_completions import generate_by_prompt
from support.trainers import config, prompts, vision_trainer

from vgr_trl.reporting.recorder import RecordBefore
from vgr_trl.rewards import accuracy_reward, vgr_reward


def length_reward(completions, **kwargs):
    """Different within a group."""
    return [float(len(completion[0]["content"])) for completion in completions]


def run(model_folder, question_file, output, rows_per_process):
    """Train, evaluate, and leave the records in `output`."""
    rows = prompts(question_file)
    options = config(
        output, max_steps=2, learning_rate=0.0, per_device_train_batch_size=rows_per_process,
        per_device_eval_batch_size=rows_per_process, max_completion_length=64, token_weights=True,
        enable_perception_filtering=True, rollout_log_steps=1, rollout_log_samples=6, eval_strategy="steps",
        eval_steps=9, rollout_log_path=str(output / "rollouts.md"),
    )  # fmt: skip
    rewards = [accuracy_reward, vgr_reward, length_reward]
    trainer = vision_trainer(model_folder, rewards, options, rows, rows.select(range(4)))
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.add_callback(RecordBefore(trainer))
    trainer.train()
    trainer.evaluate()
