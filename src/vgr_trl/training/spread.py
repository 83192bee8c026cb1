"""From one advantage per completion to one per token."""

from dataclasses import replace

from vgr_trl.credit import shape_advantages
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout


def spread(rollout: Rollout, host: Host) -> tuple[Rollout, dict[str, float]]:
    """Return the rollout with advantages (N, T) instead of (N,), if a rule of credit is on, and metrics.

    Args:
        rollout: whose groups are chosen.
        host: where it runs.
    """
    if not host.args.shapes_advantages:
        return rollout, rollout.metrics
    assert rollout.signals is not None
    assert rollout.live is not None
    advantages, metrics = shape_advantages(
        rollout.batch["advantages"],
        rollout.signals,
        host.args,
        shaped=rollout.live.to(rollout.signals.mask.device),
        gather=host.accelerator.gather,
    )
    return replace(rollout, batch={**rollout.batch, "advantages": advantages}), rollout.metrics | metrics
