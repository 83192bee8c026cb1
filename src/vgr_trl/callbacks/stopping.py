"""Save a checkpoint and stop on SIGTERM; skip updates with non-finite gradients."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from vgr_trl.errors import EvaluationStopped, NotFiniteError
from vgr_trl.metrics.step_metrics import StepMetrics

logger = logging.get_logger(__name__)
EXIT_STATUS = 128 + signal.SIGTERM  # a shell's exit status of a process that the signal ended
SECONDS_OF_ONE_REQUEST = 10


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint and stops training at the end of the step in which any process got SIGTERM.

    An evaluation is given up after its present batch.

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
        self.stopped = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if any process got the signal."""
        if self._is_asked():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End an evaluation, save and stop if any process got the signal."""
        if self._is_asked():
            self.on_step_end(args, state, control)
            raise EvaluationStopped

    def _is_asked(self) -> bool:
        asked = torch.tensor([self._asked_at is not None], device=self._accelerator.device)
        return bool(self._accelerator.gather(asked).any())

    def restore_handler(self) -> None:
        """Restore the handler of SIGTERM that was installed before the training, and forget the signal."""
        self._asked_at = None
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)


LONGEST = 5  # a run ends after this many non-finite gradients in a row


class FiniteUpdates(TrainerCallback):
    """Skips updates whose gradient is NaN or infinite: weights and moments stay as they are.

    DeepSpeed skips them itself; the accelerator reports it. Do not use it with fp16, whose loss scaler finds its scale
    by such steps.
    """

    def __init__(self, accelerator: Accelerator, step_metrics: StepMetrics) -> None:
        self._accelerator, self._step_metrics = accelerator, step_metrics
        self._skipped, self._streak = False, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Zero the gradients if any is non-finite; optimizers skip parameters without one."""
        gradients = [value.grad for value in kwargs["model"].parameters() if value.grad is not None]
        here = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]  # or shards of them
        finite = nn.utils.get_total_norm(here).isfinite()
        self._skipped = not self._accelerator.gather(finite.to(self._accelerator.device).view(1)).all()
        if self._skipped:
            kwargs["optimizer"].zero_grad()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count skipped updates, and warn of the first of several in a row.

        Raises:
            NotFiniteError: `LONGEST` updates in a row were skipped.
        """
        if not (self._skipped or self._accelerator.optimizer_step_was_skipped):
            self._streak = 0
            return
        self._streak += 1
        self._step_metrics.updates_skipped += 1
        step = state.global_step + 1
        if self._streak == LONGEST:
            problem = f"The gradient was NaN or infinite in {LONGEST} steps in a row, up to step {step}"
            raise NotFiniteError(f"{problem}: resume with a lower learning_rate or max_grad_norm.")
        if self._streak == 1 and state.is_world_process_zero:
            problem = f"The gradient of step {step} is NaN or infinite: the update is skipped (skipped/updates)"
            logger.warning(f"{problem}. {LONGEST} in a row end the run.")
