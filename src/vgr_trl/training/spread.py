"""From one advantage per completion to one per token."""

from dataclasses import replace

import torch

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.batch.signals import unmeasured
from vgr_trl.credit import shape_advantages
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout


def spread(rollout: Rollout, host: Host) -> tuple[Rollout, dict[str, float]]:
    """Return the rollout with advantages (N, T) instead of (N,), if a rule of credit is on, and metrics."""
    if not host.args.shapes_advantages:
        return rollout, rollout.metrics
    assert rollout.live is not None
    signals = rollout.signals or unmeasured(valid_tokens(rollout.batch).bool())
    rows = len(signals.mask)
    first = host.accelerator.process_index * rows
    advantages, metrics = shape_advantages(
        rollout.batch["advantages"],
        signals,
        host.args,
        shaped=rollout.live.to(signals.mask.device),
        groups=torch.arange(first, first + rows, device=signals.mask.device) // host.num_generations,
        gather=host.accelerator.gather,
        completion_ids=rollout.batch["completion_ids"],
    )
    return replace(rollout, batch={**rollout.batch, "advantages": advantages}), rollout.metrics | metrics
