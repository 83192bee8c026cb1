"""Every option, one file per stage; `help` is its description.

Read `dapo.py`, which composes them, then the stages in the order of data: `noisy.py`, `blind.py`, `measure.py`,
`perceive.py`, `choose.py`, `kl.py`, `critic.py`, `credit.py`, `skip.py`, `report.py`, `evaluate.py`. `plugins.py` names
what comes from outside, `ranges.py` checks values, `effects.py` names options that steer nothing. `foreign/` has what
others call them.
"""

from typing import TYPE_CHECKING, Any

from vgr_trl.config.blind import BlindOptions
from vgr_trl.config.choose import ChooseOptions
from vgr_trl.config.credit import CreditOptions
from vgr_trl.config.critic import CriticOptions
from vgr_trl.config.evaluate import EvaluateOptions
from vgr_trl.config.foreign.aliases import AliasOptions
from vgr_trl.config.kl import KLOptions
from vgr_trl.config.measure import MeasureOptions
from vgr_trl.config.noisy import NoisyOptions
from vgr_trl.config.perceive import PerceiveOptions
from vgr_trl.config.plugins import PluginOptions
from vgr_trl.config.report import ReportOptions
from vgr_trl.config.skip import SkipOptions

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
