"""Rules of credit that bound what a filter can do: they know the tokens that decide where to look, or draw some."""

from dataclasses import dataclass, field

import torch

from vgr_trl.registries import declares


@dataclass
class DecisionOptions:
    """Options of the controls."""

    decisive_ids: list[int] = field(default_factory=list, metadata={"help": "Tokens that decide what is seen."})


@declares(options=DecisionOptions)
def oracle(advantages, signals, mask, options, *, completion_ids):
    """Keep the boxes, the tokens that begin a call or an answer, and any others among the known ones."""
    return decides(options, completion_ids, mask), {}


@declares(options=DecisionOptions)
def at_random(advantages, signals, mask, options, *, completion_ids):
    """Keep as many tokens of every completion as the oracle, at random."""
    number = decides(options, completion_ids, mask).sum(1, keepdim=True)
    order = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, 2).argsort(1).argsort(1)
    return mask & (order < number), {}


def decides(options, completion_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens are among the known ones, (N, T) bool."""
    return torch.isin(completion_ids, torch.tensor(options.decisive_ids, device=completion_ids.device)) & mask
