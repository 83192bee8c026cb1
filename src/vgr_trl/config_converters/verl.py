"""Rename keys of verl to EasyR1's, with verl's defaults."""

from collections.abc import Mapping
from typing import Any

from vgr_trl.config_converters.key_tables import build_keys, load_tables

_TABLES = load_tables("verl")
VERL_KEYS = build_keys(_TABLES)  # keys that EasyR1 lacks
VERL_RENAMED_KEYS: dict[str, list[Any]] = _TABLES["names"]  # key of verl -> EasyR1's, and verl's default
VERL_DEFAULTS: dict[str, Any] = _TABLES["defaults"]  # of keys that both have
_MODES = {"token-mean": "token", "seq-mean-token-mean": "seq", "vanilla": "default"}


def rename_verl_keys(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by EasyR1's keys, and EasyR1 key -> name in the configuration."""
    found = VERL_DEFAULTS | {key: value for key, value in given.items() if key not in VERL_RENAMED_KEYS}
    found |= {key: given.get(name, default) for name, (key, default) in VERL_RENAMED_KEYS.items()}
    names = {key: name for name, (key, _) in VERL_RENAMED_KEYS.items()}
    own = {key: given.get(key, known.default) for key, known in VERL_KEYS.items()}
    actor = "actor_rollout_ref.actor"
    in_loss = bool(found["algorithm.use_kl_loss"])
    found["algorithm.disable_kl"] = not (in_loss or own["algorithm.use_kl_in_reward"])
    pairs = {"worker.actor.loss_avg_mode": f"{actor}.loss_agg_mode",
             "worker.actor.loss_type": f"{actor}.policy_loss.loss_mode"}  # fmt: skip
    if in_loss:
        pairs |= {"algorithm.kl_coef": f"{actor}.kl_loss_coef", "algorithm.kl_penalty": f"{actor}.kl_loss_type"}
    for key, name in pairs.items():
        found[key], names[key] = _MODES.get(own[name], own[name]), name
    return found, names
