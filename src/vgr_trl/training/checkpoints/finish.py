"""A run that was killed after its last step, before its model was written."""

from pathlib import Path

from transformers import TrainerState

from vgr_trl.training.checkpoints.folders import global_step
from vgr_trl.training.checkpoints.resumable import ResumableTrainer


def only_lacks_its_model(trainer: ResumableTrainer, checkpoint: str | None, max_steps: int, written_last: Path) -> bool:
    """Whether all steps are behind a checkpoint, and what is written after them is not there.

    Args:
        trainer: constructed; with ZeRO or FSDP the answer is no, as only a training loads their checkpoints.
        written_last: the file that a run ends with.
    """
    step = global_step(Path(checkpoint)) if checkpoint else None
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return step is not None and step >= max_steps > 0 and not sharded and not written_last.exists()


def load_trained(trainer: ResumableTrainer, checkpoint: str) -> None:
    """Give the trainer weights and state of a checkpoint that has all steps behind it, or the best weights if asked."""
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(checkpoint)
