"""The signals of this library inside verl and EasyR1; knows nothing of TRL. Guide: docs/verl.md.

`credit.py`: the options, and what becomes of signals in rewards, advantages and loss; `signals.py`: what is measured in
the actor, and token weights; `rewards.py` has verl's signature. `inside_verl/` and `inside_easyr1/` are the adapters.
"""

from vgr_trl.integrations.verl.signals import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
