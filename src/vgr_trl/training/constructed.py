"""TRL's trainer once it is constructed, with the narrower types that its attributes then have."""

from typing import TYPE_CHECKING, Any

from trl import GRPOTrainer

from vgr_trl.config import DAPOConfig

if TYPE_CHECKING:

    class ConstructedTrainer(GRPOTrainer):
        """For annotations: what a constructor has made certain."""

        args: DAPOConfig
        model: Any
        processing_class: Any
        train_dataset: Any
        eval_dataset: Any
        shuffle_dataset: bool
        num_generations: int
        num_generations_eval: int
        _logs: Any
        _buffered_inputs: Any

else:
    ConstructedTrainer = GRPOTrainer
