"""Skip updates whose gradient is NaN or infinite, and end a run after several in a row."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.errors import NotFiniteError
from vgr_trl.metrics.micro_batches import StepMetrics

logger = logging.get_logger(__name__)

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
        finite = are_finite(value.grad for value in kwargs["model"].parameters())
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
            raise NotFiniteError(
                f"The gradient was NaN or infinite in {LONGEST} steps in a row, up to step {step}: continue from the "
                "newest checkpoint with a lower learning_rate or max_grad_norm, or use torch.autograd.detect_anomaly."
            )
        if self._streak == 1 and state.is_world_process_zero:
            logger.warning(
                f"The gradient of step {step} is NaN or infinite: the update is skipped (metric skipped/updates). "
                f"{LONGEST} such steps in a row end the run."
            )


def are_finite(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return whether this process's gradients, or its shards of them, are all finite; () bool."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    if not here:
        return torch.tensor(True)
    return nn.utils.get_total_norm(here).isfinite()
