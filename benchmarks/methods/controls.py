"""Rules of credit that bound what a filter can do: they know which tokens are read off the image, or draw some."""

from dataclasses import dataclass, field

import torch

from vgr_trl.registries import declares


@dataclass
class TruthOptions:
    """Options of the controls."""

    perceived_ids: list[int] = field(default_factory=list, metadata={"help": "Tokens that are read off the image."})
    filler_ids: list[int] = field(default_factory=list, metadata={"help": "Tokens of words of filler."})


@declares(options=TruthOptions)
def oracle(advantages, signals, mask, options, *, completion_ids):
    """Keep the words that are read off the image; all tokens of a completion without any."""
    kept = is_one_of(options.perceived_ids, completion_ids, mask)
    return kept | (mask & ~kept.any(1, keepdim=True)), {}


@declares(options=TruthOptions)
def no_filler(advantages, signals, mask, options, *, completion_ids):
    """Keep all but the words of filler: the words read off the image first, the answer, tags and the end."""
    return mask & ~is_one_of(options.filler_ids, completion_ids, mask), {}


@declares(options=TruthOptions)
def at_random(advantages, signals, mask, options, *, completion_ids):
    """Keep as many tokens of every completion as the oracle, at random."""
    number = is_one_of(options.perceived_ids, completion_ids, mask).sum(1, keepdim=True)
    order = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, 2).argsort(1).argsort(1)
    kept = mask & (order < number)
    return kept | (mask & (number == 0)), {}


def is_one_of(ids: list[int], completion_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens are among `ids`, (N, T) bool."""
    return torch.isin(completion_ids, torch.tensor(ids, device=completion_ids.device)) & mask
