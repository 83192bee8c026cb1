"""Options of the stages of this library, one file per stage; `DAPOConfig` inherits them all."""

from vgr_trl.options.choose import ChooseOptions
from vgr_trl.options.credit import CreditOptions
from vgr_trl.options.measure import MeasureOptions
from vgr_trl.options.perceive import PerceiveOptions
from vgr_trl.options.report import ReportOptions

__all__ = ["ChooseOptions", "CreditOptions", "MeasureOptions", "PerceiveOptions", "ReportOptions"]
