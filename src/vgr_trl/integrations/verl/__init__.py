"""The signals of this library inside verl and EasyR1; knows neither TRL nor `training/`."""

from vgr_trl.integrations.verl.token_weights import build_token_vgr_weights_for_batch, token_vgr_weights

__all__ = ["build_token_vgr_weights_for_batch", "token_vgr_weights"]
