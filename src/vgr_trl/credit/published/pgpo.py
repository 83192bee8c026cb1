"""PGPO: advantages weighed by how much tokens depend on the image, above and below a threshold."""

from dataclasses import dataclass
from typing import Annotated

import torch

from vgr_trl import registries
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_values, in_range
from vgr_trl.credit.masked import check_shapes, min_max, with_mean_one
from vgr_trl.registries import declares


@dataclass
class PGPOOptions:
    """Numbers of PGPO."""

    pgpo_threshold: Annotated[float, in_range(1e-6, 1 - 1e-6, "in (0, 1)")] = option(
        0.4, "Importance above which tokens are amplified, in (0, 1); PGPO's tau."
    )
    pgpo_boost: Annotated[float, in_range(0, 1e6, "of at least 0")] = option(
        2.0, "How far the most important token is amplified; PGPO's beta."
    )

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("pgpo")
@declares(needs=("dependency",), options=PGPOOptions)
def pgpo(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: PGPOOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return weights with mean 1 in each completion: I / tau below the threshold, 1 + beta (I - tau) / (1 - tau) above.

    I, a token's importance, is ln(1 + dependency) scaled to [0, 1] within its completion. Weights are 1 where no
    dependency is defined, and where all tokens are alike. Source: https://huggingface.co/papers/2604.01840, equations 6
    and 7.

    Args:
        signals: with `dependency` (N, T), for PGPO under the perturbation `remove_image`.
    """
    assert signals.dependency is not None
    check_shapes("pgpo", mask, dependency=signals.dependency)
    defined = mask & ~signals.dependency.isnan()
    importance = min_max(signals.dependency.float().log1p(), defined)  # (N, T)
    threshold = options.pgpo_threshold
    above = 1 + options.pgpo_boost * (importance - threshold) / (1 - threshold)
    weights = torch.where(importance < threshold, importance / threshold, above).masked_fill(~defined, 0)
    weights = weights.masked_fill(weights.sum(1, keepdim=True) == 0, 1)
    return with_mean_one(weights, defined), {"importance": importance.masked_fill(~defined, torch.nan)}
