"""Save a checkpoint and stop on SIGTERM."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

logger = logging.get_logger(__name__)
EXIT_STATUS = 128 + signal.SIGTERM  # a shell's exit status of a process that the signal ended
SECONDS_OF_ONE_REQUEST = 10


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint and stops training at the end of the step in which any process got SIGTERM.

    A second signal ends the process at once, unless it comes within seconds: a scheduler signals all processes, and a
    launcher among them signals its own processes once more. Works in the main thread only, where Python handles
    signals. A handler that the user installed is called at each signal, after this one.

    Attributes:
        stopped: whether SIGTERM ended the training.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.stopped = False
        self._accelerator, self._before = accelerator, signal.getsignal(signal.SIGTERM)
        self._asked_at: float | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            logger.warning("SIGTERM: the run saves a checkpoint at the end of this step and stops.")
        elif time.monotonic() - self._asked_at > SECONDS_OF_ONE_REQUEST:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if callable(self._before):
            self._before(number, frame)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listen for SIGTERM."""
        self.restore_handler()  # transformers may begin again with a smaller batch, without an end before
        self.stopped, self._asked_at = False, None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if any process got the signal."""
        asked = torch.tensor([self._asked_at is not None], device=self._accelerator.device)
        if self._accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restore the user's handler."""
        self.restore_handler()

    def restore_handler(self) -> None:
        """Restore the handler of SIGTERM that was installed before the training."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
