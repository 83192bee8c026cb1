"""TRL's trainer once it is constructed, with the narrower types that its attributes then have."""

from typing import TYPE_CHECKING, Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOTrainer

from vgr_trl.config import DAPOConfig

if TYPE_CHECKING:

    class ConstructedTrainer(GRPOTrainer):
        """For annotations: what a constructor has made certain."""

        args: DAPOConfig
        model: PreTrainedModel
        processing_class: PreTrainedTokenizerBase | ProcessorMixin
        train_dataset: Dataset | IterableDataset
        eval_dataset: Dataset | IterableDataset | DatasetDict | IterableDatasetDict | None
        shuffle_dataset: bool
        num_generations: int
        num_generations_eval: int
        _logs: dict[str, Any]
        _buffered_inputs: Any

else:
    ConstructedTrainer = GRPOTrainer
