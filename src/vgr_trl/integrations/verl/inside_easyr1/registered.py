"""Estimators of this library in EasyR1's table of estimators."""

from typing import Any

import torch
from verl.trainer import core_algos

from vgr_trl.integrations.verl.at_hand import at_hand
from vgr_trl.integrations.verl.credit import estimate
from vgr_trl.integrations.verl.presets import ESTIMATORS


def _estimator(name: str) -> Any:
    def estimator(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, (N, T) each, with the signals of the batch at hand."""
        found = at_hand(name)
        return estimate(core_algos.ADV_ESTIMATOR_MAP[found.options.estimator], found, **given)

    return estimator


def register() -> None:
    """Register every name that is not registered yet."""
    for name in ESTIMATORS:
        if name not in core_algos.ADV_ESTIMATOR_MAP:
            core_algos.register_adv_estimator(name)(_estimator(name))
