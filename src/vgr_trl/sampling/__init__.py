"""Which groups are trained on: zero-variance groups, online filtering, dynamic sampling, replay buffer."""

from vgr_trl.sampling.replay import ReplayBuffer

__all__ = ["ReplayBuffer"]
