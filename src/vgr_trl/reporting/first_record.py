"""Record an evaluation batch before the first training step."""

import copy
import random
from collections.abc import Sized
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from vgr_trl.patches.trl import unlogged
from vgr_trl.patching import keep_random_state, patched_attribute
from vgr_trl.rollout import ConstructedTrainer


class RecordBeforeTraining(TrainerCallback):
    """Record the first evaluation batch at step 0, so that later evaluations can be compared with it.

    Costs one rollout, including reward functions. Random state, metrics and completion tables are restored.
    """

    def __init__(self, trainer: ConstructedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the batch, unless the run is resumed."""
        trainer = self._trainer
        if state.global_step > 0 or not needs_record_before_training(trainer):
            return
        data, size = _first_eval_dataset(trainer), trainer.args.eval_batch_size
        first = trainer.accelerator.process_index * size
        rows = [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]
        logs = patched_attribute(trainer, "_logs", copy.deepcopy(trainer._logs))
        python, numpy = random.getstate(), np.random.get_state()
        trainer.model_wrapped.eval()
        try:
            with keep_random_state(trainer.accelerator.device), torch.no_grad(), unlogged(trainer), logs:
                trainer._prepare_inputs(rows)
        finally:
            trainer.model_wrapped.train()
            random.setstate(python)
            np.random.set_state(numpy)


def needs_record_before_training(trainer: ConstructedTrainer) -> bool:
    """Whether a run records rollouts, evaluates a data set of known length, and not already at step 0."""
    args, data = trainer.args, _first_eval_dataset(trainer)
    wanted = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return wanted and isinstance(data, Sized) and len(data) > 0


def _first_eval_dataset(trainer: ConstructedTrainer) -> Any:
    data = trainer.eval_dataset
    return next(iter(data.values()), None) if isinstance(data, dict) else data
