"""Estimators and policy losses of this library in verl's registries. Import it where verl is installed."""

import inspect
from typing import Any

import torch
from verl.trainer.ppo import core_algos

from vgr_trl.integrations.verl.at_hand import at_hand
from vgr_trl.integrations.verl.credit import estimate
from vgr_trl.integrations.verl.losses import with_terms
from vgr_trl.integrations.verl.presets import ESTIMATORS, LOSSES


def _estimator(name: str) -> Any:
    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, (N, T) each, with the signals of the batch at hand."""
        found = at_hand(name)
        base = core_algos.get_adv_estimator_fn(found.options.estimator)
        taken = inspect.signature(base).parameters
        if "norm_adv_by_std_in_grpo" in taken and more.get("config") is not None:
            more["norm_adv_by_std_in_grpo"] = more["config"].get("norm_adv_by_std_in_grpo", True)
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            more = {key: value for key, value in more.items() if key in taken}
        return estimate(
            base,
            found,
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            index=index,
            **more,
        )

    return estimator


def register() -> None:
    """Register every name that is not registered yet."""
    for name in ESTIMATORS:
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(_estimator(name))
    for name in LOSSES:
        if name not in core_algos.POLICY_LOSS_REGISTRY:
            vanilla = core_algos.get_policy_loss_fn("vanilla")
            core_algos.register_policy_loss(name)(with_terms(vanilla, core_algos.agg_loss, name))
