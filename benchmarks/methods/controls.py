"""Rules of credit that bound what a filter can do: one knows which tokens are read off the image, one draws them."""

from dataclasses import dataclass, field

import torch

from vgr_trl.registries import declares


@dataclass
class TruthOptions:
    """Options of the two controls."""

    perceived_ids: list[int] = field(default_factory=list, metadata={"help": "Tokens that are read off the image."})


@declares(options=TruthOptions)
def oracle(advantages, signals, mask, options, *, completion_ids):
    """Keep the words that are read off the image; all tokens of a completion without any."""
    kept = is_perceived(completion_ids, mask, options)
    return kept | (mask & ~kept.any(1, keepdim=True)), {}


@declares(options=TruthOptions)
def at_random(advantages, signals, mask, options, *, completion_ids):
    """Keep as many tokens of every completion as the oracle, at random."""
    number = is_perceived(completion_ids, mask, options).sum(1, keepdim=True)
    order = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, 2).argsort(1).argsort(1)
    kept = mask & (order < number)
    return kept | (mask & (number == 0)), {}


def is_perceived(completion_ids: torch.Tensor, mask: torch.Tensor, options: TruthOptions) -> torch.Tensor:
    """Return which tokens are read off the image, (N, T) bool."""
    ids = torch.tensor(options.perceived_ids, device=completion_ids.device)
    return torch.isin(completion_ids, ids) & mask
