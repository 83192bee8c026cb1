"""VGPO: advantages weighed by how much tokens, and completions of a prompt, resemble the image."""

from dataclasses import dataclass
from typing import Annotated

import torch

from vgr_trl import registries
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.config.option import option
from vgr_trl.config.ranges import Fraction, check_values, in_range
from vgr_trl.credit.masked import SMALLEST_RANGE, check_shapes, masked_mean, min_max
from vgr_trl.credit.trajectory import Gather
from vgr_trl.registries import declares

TOKEN_CLAMP = (0.1, 2.0)
COMPLETION_CLAMP = (0.9, 2.0)


@dataclass
class VGPOOptions:
    """Numbers of VGPO."""

    vgpo_compensation: Annotated[float, in_range(0, 1e6, "of at least 0")] = option(
        0.3, "By how much the score of a completion's last token is raised; VGPO's beta."
    )
    vgpo_gate_share: Fraction = option(0.2, "Share of the late tokens whose score is raised, in (0, 1]; VGPO's kappa.")
    vgpo_gate_start: Annotated[float, in_range(0, 1 - 1e-9, "in [0, 1)")] = option(
        0.5, "Share of a completion behind which tokens are late, in [0, 1)."
    )

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("vgpo")
@declares(needs=("similarity",), options=VGPOOptions)
def vgpo(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    mask: torch.Tensor,
    options: VGPOOptions,
    *,
    groups: torch.Tensor | None = None,
    gather: Gather | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weight of each token in its completion, times that of its completion among those of the prompt.

    With scores r = (similarity + 1) / 2 of a completion's n tokens, those among the late ones (from token
    ⌊n · vgpo_gate_start⌋) that are in the largest `vgpo_gate_share` are raised by 1 + beta · t / (n - 1). Scaled to
    [0, 1] within the completion they are w, and a token's weight is 1 + w - mean w, in `TOKEN_CLAMP`. Sums of w,
    scaled to [0, 1] within the prompt's completions, are u; a completion's weight is 1 + u - mean u, in
    `COMPLETION_CLAMP`. Source: https://huggingface.co/papers/2604.09349 and its code.

    Args:
        signals: with `similarity` (N, T); weights are 1 where a completion has none.
        groups: (N,) which prompt each completion belongs to, over all processes; None: all belong to one.
    """
    assert signals.similarity is not None
    check_shapes("vgpo", mask, similarity=signals.similarity)
    seen = mask & ~signals.similarity.isnan()
    raised = _compensated((signals.similarity.float() + 1) / 2, seen, options)
    scaled = min_max(raised, seen)  # (N, T)
    tokens = (1 + scaled - masked_mean(scaled, seen)).clamp(*TOKEN_CLAMP).masked_fill(~seen, 1)
    blind = ~seen.any(1) & mask.any(1)
    sums = scaled.sum(1).masked_fill(blind, torch.nan)  # (N,)
    completions = _among_prompts(sums, torch.zeros_like(sums) if groups is None else groups, gather)
    return tokens * completions.unsqueeze(1), {"completion_weight": completions}


def _compensated(scores: torch.Tensor, seen: torch.Tensor, options: VGPOOptions) -> torch.Tensor:
    """Return scores (N, T) of which the largest among the late ones are raised, more the later they are."""
    place = seen.cumsum(1) - 1  # (N, T), of each token among those that count
    length = seen.sum(1, keepdim=True)  # (N, 1)
    late = seen & (place >= (length * options.vgpo_gate_start).floor())
    count = (late.sum(1, keepdim=True) * options.vgpo_gate_share).floor().clamp(min=1).long()  # (N, 1)
    ordered = scores.masked_fill(~late, -torch.inf).sort(1, descending=True).values
    smallest = ordered.gather(1, count - 1)  # of those that are raised, ties included
    gate = late & (scores >= smallest)
    return scores * (1 + gate * options.vgpo_compensation * place / (length - 1).clamp(min=1))


def _among_prompts(sums: torch.Tensor, groups: torch.Tensor, gather: Gather | None) -> torch.Tensor:
    """Return each completion's weight (N,) by its sum among those of its prompt, 1 where it has none."""
    groups = groups.to(sums.device)
    every, prompts = (sums, groups) if gather is None else (gather(sums), gather(groups))
    beside = (groups.unsqueeze(1) == prompts) & ~every.isnan()  # (N, all)
    low = every.expand(beside.shape).masked_fill(~beside, torch.inf).amin(1)
    high = every.expand(beside.shape).masked_fill(~beside, -torch.inf).amax(1)
    mean = masked_mean(every.nan_to_num(), beside).squeeze(1)
    weights = 1 + (sums - mean) / (high - low + SMALLEST_RANGE)
    return weights.clamp(*COMPLETION_CLAMP).masked_fill(sums.isnan(), 1)
