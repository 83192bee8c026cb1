"""verl's synchronous trainer, with the signals of the actor in its batches: `trainer.v1.trainer_mode=vgr_sync`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.at_hand import COLUMNS, SignalsAtHand, lay_at_hand
from vgr_trl.integrations.verl.inside_verl.engine import KEY
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.integrations.verl.perturbed import told
from vgr_trl.integrations.verl.presets import LOSSES, options_of
from vgr_trl.integrations.verl.token_weights import as_weights

WEIGHTS = "token_weights"  # of a reward


def read_options(config: Any) -> SignalOptions:
    """Return the options under `algorithm.vgr` of a configuration of verl.

    Raises:
        ConfigError: an option is unknown, out of range, or means nothing in this run.
    """
    given = config.algorithm.get("vgr")
    given = OmegaConf.to_container(given, resolve=True) if given is not None else {}
    loss_mode = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    options = options_of(config.algorithm.adv_estimator, given, loss_mode)
    if options.apply_to == "mask":
        raise ConfigError(
            "apply_to is mask, but the loss of verl casts response_mask to bool, which would drop the weights: leave "
            "it at advantages."
        )
    correction = config.algorithm.get("rollout_correction")
    measures = options.measures_attention or options.needs_dependency
    if measures and correction is not None and correction.get("bypass_mode", False):
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode leaves out the pass that measures signals: switch it off."
        )
    return options


class SignalTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's trainer, and around its steps what signals need.

    `_compute_old_log_prob`: asks the engine to measure, and keeps what it measured along the responses.
    `_compute_advantage`: lays that at hand for the registered estimators, and logs their metrics.
    `_update_actor`: tells the engine which terms the loss has.
    `_val_metrics_update`: leaves out token weights, of which verl would take means.
    """

    def __init__(self, config: Any) -> None:
        self.signal_options = read_options(config)
        super().__init__(config)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        options = self.signal_options
        if not (options.measures_attention or options.needs_dependency):
            return super()._compute_old_log_prob(batch, metrics)
        batch.extra_info[KEY] = self._told()
        after = super()._compute_old_log_prob(batch, metrics)
        for meta in (batch, after):
            (meta.extra_info or {}).pop(KEY, None)
        self._keep_along_responses(batch)
        return after

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if any(not key.endswith("_0") for key in batch.keys):  # PROMPT_SESSION_OUTPUT
            raise ConfigError(
                "An agent loop has returned several outputs of one session, which the estimators of this library "
                "would take for several completions: let it return one."
            )
        columns = self._columns(batch)
        weights = self._token_weights(batch, columns.pop("response_mask"))
        with lay_at_hand(SignalsAtHand(self.signal_options, columns, weights)) as found:
            after = super()._compute_advantage(batch, metrics)
        metrics.update(found.metrics)
        return after

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla") in LOSSES:
            batch.extra_info[KEY] = self._told()
        after = super()._update_actor(batch, metrics)
        (after.extra_info or {}).pop(KEY, None)
        return after

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Mapping[str, Any], *rest: Any, **more: Any
    ) -> Any:
        infos = {name: values for name, values in reward_extra_infos_dict.items() if name != WEIGHTS}
        return super()._val_metrics_update(data_sources, sample_uids, infos, *rest, **more)

    def _told(self) -> dict[str, Any]:
        """What the engine is told: options, and what only the processor knows."""
        processor = self.processor if self.processor is not None else self.tokenizer
        return told(self.signal_options, int(self.global_steps), processor)

    def _keep_along_responses(self, batch: Any) -> None:
        """Cut the columns, which the engine returns along whole sequences, to the responses."""
        data = _get(batch, [*COLUMNS, "response_mask"])
        found = {name: response_from_nested(data[name], data["response_mask"]) for name in COLUMNS if name in data}
        if found:
            fields = TensorDict(found, batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _columns(self, batch: Any) -> dict[str, torch.Tensor]:
        data = _get(batch, [*COLUMNS, "entropy", "old_log_probs", "response_mask"])
        found = {name: value.to_padded_tensor(0) for name, value in data.items() if name != "response_mask"}
        if "entropy" in found:
            found["entropies"] = found.pop("entropy")
        return {**found, "response_mask": data["response_mask"].to_padded_tensor(0)}

    def _token_weights(self, batch: Any, response_mask: torch.Tensor) -> torch.Tensor | None:
        """`token_weights` among what the reward returned beside the score, None if no row has them."""
        if not self.signal_options.token_weights:
            return None
        data = _get(batch, ["extra_fields"])
        fields: Sequence[Any] = list(data["extra_fields"]) if "extra_fields" in data else []
        infos = [(getattr(each, "data", each) or {}).get("reward_extra_info") or {} for each in fields]
        rows = [info.get(WEIGHTS) for info in infos]
        return None if all(row is None for row in rows) else as_weights(rows, response_mask)


def _get(batch: Any, fields: list[str]) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
