"""Reinforcement learning of vision-language models with TRL: an image prompt is computed once for its completions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.trainer import DAPOTrainer

__version__ = "0.2.0"
__all__ = ["DAPOConfig", "DAPOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the trainer on first use, so that `vgr_trl.rewards` and `vgr-trl --help` do not load torch."""
    if name in ("DAPOConfig", "DAPOTrainer"):
        from vgr_trl.errors import check_release

        check_release()
    if name == "DAPOConfig":
        from vgr_trl.dapo_config import DAPOConfig

        return DAPOConfig
    if name == "DAPOTrainer":
        from vgr_trl.trainer import DAPOTrainer

        return DAPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
