"""Signals of this library inside verl and EasyR1, without TRL. Guide: docs/migration.md.

`credit.py`: options, and signals in rewards, advantages and loss. `signals.py`: measurement in the actor, and token
weights. `rewards.py`: rewards with their signatures. `inside_verl/` and `inside_easyr1/`: the adapters.
"""

from vgr_trl.integrations.verl.signals import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
