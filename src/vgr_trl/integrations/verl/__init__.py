"""The signals of this library inside verl and EasyR1; knows neither TRL nor `training/`. Guide: docs/verl.md.

Read `token_weights.py` (weights of a batch, from matrices or from the probe), `options.py`, `presets.py`, then what
becomes of signals: `at_hand.py` (on their way to estimators), `credit.py`, `group_rewards.py`, `losses.py`,
`rewards.py`. In the actor: `measured_pass.py`, `perturbed.py`. Where it is hung in, after `seams.py` has looked:
`inside_verl/`, `inside_easyr1/`.
"""

from vgr_trl.integrations.verl.signals import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
