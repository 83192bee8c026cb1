"""What the policy answered before its first step: the questions that every evaluation asks first, for the records."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from vgr_trl.training.constructed import ConstructedTrainer


class RecordBefore(TrainerCallback):
    """Records the first batch of the evaluation data at step 0, where evaluations will ask the same questions again.

    It costs one rollout, which calls the reward functions, and leaves no other trace: random state, metrics and tables
    of completions are what they were.

    Args:
        on_recorded: called afterwards.
    """

    def __init__(self, trainer: ConstructedTrainer, on_recorded: Callable[[], None]) -> None:
        self._trainer, self._on_recorded = trainer, on_recorded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer, unless the run goes on."""
        trainer = self._trainer
        if state.global_step > 0 or not is_recorded_before(trainer):
            return
        model = trainer.model_wrapped
        model.eval()
        try:
            with _untouched(trainer), torch.no_grad():
                trainer._prepare_inputs(_first_rows(trainer))
        finally:
            model.train()
            self._on_recorded()


def is_recorded_before(trainer: ConstructedTrainer) -> bool:
    """Whether a run that begins has rows of a known number to evaluate on, records, and does not evaluate at once."""
    args, data = trainer.args, _evaluated(trainer)
    asked = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return asked and hasattr(data, "__len__") and len(data) > 0


def _evaluated(trainer: ConstructedTrainer) -> Any:
    data = trainer.eval_dataset
    return next(iter(data.values()), None) if isinstance(data, dict) else data


def _first_rows(trainer: ConstructedTrainer) -> list[Any]:
    """The rows that this process gets first in an evaluation."""
    data = _evaluated(trainer)
    size, accelerator = trainer.args.eval_batch_size, trainer.accelerator
    first = accelerator.process_index * size
    return [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]


@contextmanager
def _untouched(trainer: ConstructedTrainer) -> Iterator[None]:
    metrics, logs = copy.deepcopy(trainer._metrics["eval"]), copy.deepcopy(trainer._logs)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        trainer._metrics["eval"], trainer._logs = metrics, logs
