"""Which tokens get the credit: from one advantage per completion to one per token, and the loss terms beside them.

Read `advantages.py` (completions compared), `shaping.py` (the rules that are on, composed), `rules.py` (the rules), and
what they are made of: `token_weights.py`, `filters.py`, `trajectory.py`. Rules of papers: `published/`. Beside them
`perception_loss.py`, `kl.py` and `gae.py`; `collapse.py` (signs of it). What they share: `masked.py` (shapes and
means), `totals.py` (metrics over processes).
"""

from vgr_trl.config.stages.credit import CreditOptions
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.rules import attention_weights
from vgr_trl.credit.shaping import shape_advantages
from vgr_trl.credit.token_weights import dependency_weights, token_weights
from vgr_trl.credit.trajectory import trajectory_scale

__all__ = [
    "CreditOptions",
    "attention_weights",
    "dependency_weights",
    "shape_advantages",
    "token_weights",
    "top_fraction_mask",
    "trajectory_scale",
]
