"""Options that several keys of EasyR1 make together.

A rule takes the values of all keys, where it runs, and `set`, which notes an option, its value and the keys it is made
of (`values.py`). Read `batches.py` first: their steps are rollouts, ours are updates; then `data.py`, `model.py`,
`learning.py` and `run.py`.
"""

from vgr_trl.config.foreign.rules.batches import batches, evaluations, schedule
from vgr_trl.config.foreign.rules.data import data
from vgr_trl.config.foreign.rules.learning import advantages, critic, divergence, filtering, losses
from vgr_trl.config.foreign.rules.model import model, optimizer, rollout
from vgr_trl.config.foreign.rules.run import reward, run

RULES = (
    model, data, reward, batches, schedule, evaluations, optimizer, rollout, advantages, critic, losses, divergence,
    filtering, run,
)  # fmt: skip

__all__ = ["RULES"]
