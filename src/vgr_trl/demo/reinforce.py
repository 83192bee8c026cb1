"""Reinforcement of the demo's model with `DAPOTrainer`."""

from pathlib import Path
from typing import Any

from transformers import ProgressCallback

from vgr_trl.config import DAPOConfig
from vgr_trl.demo.dataset import Rows, as_dataset
from vgr_trl.demo.options import Options
from vgr_trl.rewards import accuracy_reward, think_format_reward
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.recording.before import RecordBefore

ASKED_AGAIN = 32  # questions of the evaluation, answered twice each


def reinforce(model: Any, processor: Any, rows: Rows, asked: Rows, options: Options, output_dir: Path) -> None:
    """Train `model` in place with `DAPOTrainer` on `rows`; leave model, state and rollouts in `output_dir`.

    The first of `asked` are answered before the first step and after the last one, for the records; in between they
    would change what is sampled in training.
    """
    trainer = DAPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=trainer_options(
            options,
            output_dir,
            eval_strategy="steps",
            eval_steps=options.steps,
            num_generations_eval=2,
            per_device_eval_batch_size=2 * ASKED_AGAIN,
            rollout_log_samples=16,
        ),
        train_dataset=as_dataset(rows),
        eval_dataset=as_dataset(asked[:ASKED_AGAIN]),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReinforceBar())
    trainer.add_callback(RecordBefore(trainer, trainer.stages.recorder.evaluated))
    trainer.train()
    trainer.save_model(str(output_dir))
    trainer.save_state()


def trainer_options(options: Options, output_dir: Path, **changed: Any) -> DAPOConfig:
    """Return the options of `DAPOTrainer` for a model of a million parameters on a CPU, some of them changed."""
    chosen: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": options.seed,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.prompts_per_step * options.num_generations,
        "num_generations": options.num_generations,
        "max_completion_length": 16,
        "temperature": options.temperature,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.lr_scheduler_type,
        "warmup_steps": 3,
        "reward_weights": [1.0, 0.2],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": False,  # logging errors only, as here, would turn the bar off and a printer on
        "dataloader_pin_memory": False,
    }
    return DAPOConfig(**chosen | changed)


class ReinforceBar(ProgressCallback):
    """The trainer's progress bar with the mean reward in it, instead of a dictionary printed at every step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("reinforce")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the reward."""
        if self.training_bar is not None and logs and "reward" in logs:
            self.training_bar.set_postfix(reward=f"{logs['reward']:.2f}", refresh=False)
