"""Every option, one file per stage; `help` is its description.

Read `option.py`, `dapo.py`, which composes all, then `stages/` in the order of data. `plugins.py` names what comes from
outside, `ranges.py` and `of_trl.py` check values, `conflicts.py` pairs of them, `effects.py` names options that steer
nothing. `foreign/` has what others call them.
"""

from typing import TYPE_CHECKING, Any

from vgr_trl.config.foreign.aliases import AliasOptions
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.stages.blind import BlindOptions
from vgr_trl.config.stages.choose import ChooseOptions
from vgr_trl.config.stages.credit import CreditOptions
from vgr_trl.config.stages.critic import CriticOptions
from vgr_trl.config.stages.evaluate import EvaluateOptions
from vgr_trl.config.stages.kl import KLOptions
from vgr_trl.config.stages.measure import MeasureOptions
from vgr_trl.config.stages.noisy import NoisyOptions
from vgr_trl.config.stages.perceive import PerceiveOptions
from vgr_trl.config.stages.report import ReportOptions
from vgr_trl.config.stages.skip import SkipOptions

if TYPE_CHECKING:
    from vgr_trl.config.dapo import DAPOConfig

__all__ = [
    "AliasOptions",
    "BlindOptions",
    "ChooseOptions",
    "CreditOptions",
    "CriticOptions",
    "DAPOConfig",
    "EvaluateOptions",
    "KLOptions",
    "MeasureOptions",
    "NoisyOptions",
    "PerceiveOptions",
    "PluginOptions",
    "ReportOptions",
    "SkipOptions",
]


def __getattr__(name: str) -> Any:
    """Import `DAPOConfig` on first use: it needs TRL, the options of the stages do not."""
    if name == "DAPOConfig":
        from vgr_trl.config.dapo import DAPOConfig

        return DAPOConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
