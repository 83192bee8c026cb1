"""The signals of this library inside verl and EasyR1; knows nothing of TRL. Guide: docs/verl.md.

Read `options.py`, then `signals.py` (what is measured in the actor, and token weights) and `credit.py` (what becomes of
it in advantages and loss); `rewards.py` has verl's signature. They meet the trainers in `inside_verl/` and
`inside_easyr1/`.
"""

from vgr_trl.integrations.verl.signals import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
