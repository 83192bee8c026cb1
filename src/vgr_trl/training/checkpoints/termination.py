"""A scheduler's SIGTERM: the step at hand is finished and saved, and the run ends so that it can be continued."""

import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

logger = logging.get_logger(__name__)
EXIT_STATUS = 128 + signal.SIGTERM  # what a shell says of a process that the signal has ended
SECONDS_OF_ONE_REQUEST = 10


def _pass_over_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    if initialise is not None:
        initialise(worker)


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint at the end of the step in which any process got SIGTERM, and stops the training there.

    A second signal ends the process at once, unless it comes within seconds: a scheduler signals all processes, and a
    launcher among them signals its own once more. Only in the main thread, where Python takes signals.

    Attributes:
        stopped: whether the training was ended by it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.stopped = False
        self._accelerator, self._before = accelerator, signal.getsignal(signal.SIGTERM)
        self._asked_at: float | None = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            logger.warning("SIGTERM: the run saves a checkpoint at the end of this step and stops.")
        elif time.monotonic() - self._asked_at > SECONDS_OF_ONE_REQUEST:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Listen, and let processes that load data pass over what is sent to them as well."""
        self._before = signal.signal(signal.SIGTERM, self._ask)
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # that of accelerate's
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = partial(_pass_over_signals, loader.worker_init_fn)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if any process was asked to."""
        asked = torch.tensor([self._asked_at is not None], device=self._accelerator.device)
        if self._accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave signals as they were."""
        signal.signal(signal.SIGTERM, self._before)
