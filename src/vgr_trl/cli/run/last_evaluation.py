"""The evaluation at the end of a run, which its last step may have made already."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vgr_trl.trainer import DAPOTrainer


class LastEvaluation(TrainerCallback):
    """Keeps the metrics of the newest step that was evaluated, of all parts of the data."""

    def __init__(self) -> None:
        self.step, self.metrics = -1, dict[str, float]()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add the metrics of a part of the data, or begin anew with those of another step."""
        if state.global_step != self.step:
            self.step, self.metrics = state.global_step, {}
        self.metrics |= given["metrics"]

    def of_final_model(self, trainer: DAPOTrainer) -> dict[str, float]:
        """Return the metrics of the model as it is once trained; nothing where there are no data to evaluate on."""
        if trainer.eval_dataset is None:
            return {}
        if self.step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            trainer.evaluate()
        return self.metrics
