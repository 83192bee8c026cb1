"""Signals of this library inside verl and EasyR1, without TRL. Guide: docs/migration.md.

`credit.py`: options, and signals in rewards, advantages and loss, with verl's signatures. `signals.py`: measurement in
the actor, and token weights. `inside_verl/` and `inside_easyr1/`: the adapters.
"""

from vgr_trl.integrations.verl.signals import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
