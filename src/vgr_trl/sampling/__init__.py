"""Selection of groups to train on: zero-variance groups, online filtering, dynamic sampling, replay buffer."""

from vgr_trl.sampling.replay import ReplayBuffer

__all__ = ["ReplayBuffer"]
