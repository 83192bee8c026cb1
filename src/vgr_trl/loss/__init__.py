"""Loss terms beside TRL's: KL divergences, perception loss, entropy penalty, distillation."""

from vgr_trl.loss.distillation import gated_distillation, teacher_divergence
from vgr_trl.loss.kl import AdaptiveKLController, FixedKLController, kl_penalty

__all__ = ["AdaptiveKLController", "FixedKLController", "gated_distillation", "kl_penalty", "teacher_divergence"]
