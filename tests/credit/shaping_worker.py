"""Run by test_two_processes.py: shape the local half of a batch, or all of it, with a real process group."""

import dataclasses

import torch
import torch.distributed as dist

from vgr_trl.credit import CreditOptions, shape_advantages
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass

OPTIONS = CreditOptions(
    token_weights=True, enable_perception_filtering=True, enable_entropy_filtering=True,
    enable_trajectory_reweighting=True,
)  # fmt: skip
WEIGHTINGS = {"filter": None, "soft": None, "vgpo": ["vgpo"], "vepo": ["vepo"]}
PROMPTS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])  # of which the second has completions on both of two processes


def shaped(rank, world, gather):
    """Advantages and metrics of one of `world` parts of a batch, by the weighting of tokens."""
    generator = torch.Generator().manual_seed(7)
    rows, tokens = 8, 12
    lengths = torch.tensor([12, 1, 0, 7, 3, 12, 5, 9]).unsqueeze(1)
    draws = [torch.rand(rows, tokens, generator=generator) for _ in range(4)]
    advantages = torch.randn(rows, generator=generator)
    live = torch.tensor([True, True, True, True, False, True, True, False])
    vision = torch.full((3, rows, tokens), 0.2)
    ones = torch.ones(rows, dtype=torch.long)
    mask = torch.arange(tokens) < lengths
    here = slice(rank * rows // world, (rank + 1) * rows // world)
    attention = AttentionMass(vision[:, here], (vision * (0.3 + draws[0]))[:, here], ones[here], ones[here], mask[here])
    signals = RolloutSignals(
        -draws[1][here], draws[2][here], mask[here], attention, dependency=5 * draws[3][here] ** 4,
        similarity=2 * draws[0][here] - 1, jsd=draws[0][here] / 2, perturbed_entropies=draws[3][here],
    )  # fmt: skip
    results = {}
    for weighting, rules in WEIGHTINGS.items():
        chosen = dataclasses.replace(OPTIONS, perception_weighting="soft" if weighting == "soft" else "filter")
        chosen.credit_rules = rules
        values, metrics = shape_advantages(
            advantages[here], signals, chosen, shaped=live[here], groups=PROMPTS[here], gather=gather
        )
        results[weighting] = {"advantages": values.tolist(), "metrics": metrics}
    return results


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def _close_at_exit():
    from vgr_trl.patches import close_group_at_exit  # needs TRL, which what is tested here does not

    close_group_at_exit()


def shaped_in_group():
    """The part of this process."""
    dist.init_process_group("gloo")
    _close_at_exit()
    return shaped(dist.get_rank(), dist.get_world_size(), gathered)
