"""Updates whose gradient is not finite are left out, as verl and EasyR1 leave them out."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.errors import NotFiniteError

logger = logging.get_logger(__name__)

LONGEST = 5  # steps in a row whose gradient is not finite, after which the run ends


class FiniteUpdates(TrainerCallback):
    """Leaves out updates whose gradient is NaN or infinite: weights and moments stay as they are.

    DeepSpeed leaves them out itself, and is asked whether it has. With fp16 nothing is done here: by such steps the
    scaler of the loss looks for its scale.
    """

    def __init__(self, accelerator: Accelerator, count: Callable[[], None]) -> None:
        self._accelerator, self._count = accelerator, count
        self._left_out, self._streak = False, 0

    @property
    def _is_off(self) -> bool:
        return bool(self._accelerator.mixed_precision == "fp16")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients away if any is not finite: optimizers pass over parameters without one."""
        if self._is_off:
            return
        finite = are_finite(value.grad for value in kwargs["model"].parameters())
        self._left_out = not self._accelerator.gather(finite.to(self._accelerator.device).view(1)).all()
        if self._left_out:
            kwargs["optimizer"].zero_grad()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count, say it at the first of several in a row, and end the run at the last that is borne.

        Raises:
            NotFiniteError: there were `LONGEST` in a row.
        """
        if self._is_off:
            return
        if not (self._left_out or self._accelerator.optimizer_step_was_skipped):
            self._streak = 0
            return
        self._streak += 1
        self._count()
        step = state.global_step + 1
        if self._streak == LONGEST:
            raise NotFiniteError(
                f"The gradient was NaN or infinite in {LONGEST} steps in a row, up to step {step}, and nothing was "
                "trained in them: continue from the newest checkpoint with a lower learning_rate or max_grad_norm, or "
                "find where it comes from (bfloat16 instead of float16, rewards, torch.autograd.set_detect_anomaly)."
            )
        if self._streak == 1 and state.is_world_process_zero:
            logger.warning(
                f"The gradient of step {step} is NaN or infinite: the update is left out, and weights and optimizer "
                f"stay as they were (metric skipped/updates); {LONGEST} such steps in a row end the run."
            )


def are_finite(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return whether all gradients, of which this process may have a part, are finite; () bool."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    if not here:
        return torch.tensor(True)
    return nn.utils.get_total_norm(here).isfinite()
