"""EasyR1's actor: its pass for old log-probabilities measures signals, its loss may look at perturbed images."""

from collections.abc import Mapping
from typing import Any

import torch
from verl.trainer.core_algos import average_loss
from verl.workers.actor import dp_actor

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.losses import TermsAtHand, token_terms
from vgr_trl.integrations.verl.measured_pass import Layout, MeasuredPass, packed_layout, padded_layout
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.integrations.verl.perturbed import perturb_row
from vgr_trl.replacing import replaced
from vgr_trl.signals.dependency import visual_dependency

KEY = "vgr"  # of a batch's `meta_info`


class SignalActor(dp_actor.DataParallelPPOActor):  # type: ignore[misc]
    """EasyR1's actor and, for batches that ask for it, attention and dependency beside log-probabilities.

    `compute_log_prob`: keeps what was measured in `columns`, (N, T) each, in the order of the batch.
    `_forward_micro_batch`: measures around `super()`, and calls it again over perturbed images where these are wanted.
    `update_policy`: adds the terms of the loss to EasyR1's.
    """

    columns: Mapping[str, torch.Tensor] = {}
    _told: Mapping[str, Any] | None = None
    _names: tuple[str, ...] = ()
    _perturbed_logps: torch.Tensor | None = None

    @torch.no_grad()
    def compute_log_prob(self, data: Any) -> torch.Tensor:
        """Return log-probabilities (N, T)."""
        told = data.meta_info.get(KEY)
        if told is None or self.actor_optimizer is None:  # the reference has none
            return super().compute_log_prob(data)
        self._told, self._names = told, ()
        try:
            stacked = super().compute_log_prob(data)  # (N, T), or with columns (N, T, C)
        finally:
            self._told = None
        if not self._names:
            return stacked
        logps, *columns = stacked.unbind(-1)
        self.columns = dict(zip(self._names, columns, strict=True))
        return logps

    def _forward_micro_batch(self, micro_batch: dict[str, Any], temperature: float) -> torch.Tensor:
        if self._told is None:
            return super()._forward_micro_batch(micro_batch, temperature)
        options = SignalOptions.read(self._told["options"])
        if torch.is_grad_enabled():
            logps = super()._forward_micro_batch(micro_batch, temperature)
            if options.uses_perception_loss:
                self._perturbed_logps = super()._forward_micro_batch(self._dark(micro_batch, options), temperature)
            return logps
        columns: dict[str, torch.Tensor] = {}
        if options.measures_attention:
            measured = MeasuredPass(
                self.actor_module, self._layout(micro_batch), options, self._told["special_token_ids"]
            )
            with measured.active():
                logps = super()._forward_micro_batch(micro_batch, temperature)
            columns = {name: self._of_responses(column, micro_batch) for name, column in measured.columns.items()}
        else:
            logps = super()._forward_micro_batch(micro_batch, temperature)
        if options.needs_dependency:
            other = super()._forward_micro_batch(self._dark(micro_batch, options), temperature)
            blind = torch.tensor(["pixel_values" not in row for row in _rows_of_images(micro_batch)])
            dependency = visual_dependency(logps, other)
            columns["vgr_dependency"] = dependency.masked_fill(blind.to(dependency.device).unsqueeze(1), torch.nan)
        self._names = tuple(columns)
        return torch.stack([logps.float(), *(column.to(logps.device) for column in columns.values())], dim=-1)

    def update_policy(self, data: Any) -> dict[str, Any]:
        """Train on the batch, and return metrics."""
        told = data.meta_info.get(KEY)
        if told is None:
            return super().update_policy(data)
        options = SignalOptions.read(told["options"])
        plain = dp_actor.compute_policy_loss

        def loss(*, log_probs: Any, response_mask: Any, loss_avg_mode: str, **given: Any) -> Any:
            value, metrics = plain(
                log_probs=log_probs, response_mask=response_mask, loss_avg_mode=loss_avg_mode, **given
            )
            terms = token_terms(TermsAtHand(options, self._perturbed_logps), log_probs, response_mask)
            for name, per_token in terms.items():
                share = average_loss(per_token, response_mask, mode=loss_avg_mode)
                value, metrics[name] = value + share, share.detach().item()
            return value, metrics

        self._told = told
        try:
            with replaced(dp_actor, "compute_policy_loss", loss):
                return super().update_policy(data)
        finally:
            self._told = self._perturbed_logps = None

    def _layout(self, micro_batch: dict[str, Any]) -> Layout:
        ids, present = micro_batch["input_ids"], micro_batch["attention_mask"].bool()
        prompt = present & (torch.arange(ids.size(1), device=ids.device) < ids.size(1) - self._length(micro_batch))
        if not self.config.padding_free:
            return padded_layout(ids, present, prompt)
        if self.config.ulysses_size > 1:
            raise ConfigError(
                "Attention cannot be measured where sequences are cut over processes: set worker.actor.ulysses_size=1."
            )
        return packed_layout(ids[present], present.sum(1).tolist(), prompt.sum(1).tolist())

    def _of_responses(self, column: torch.Tensor, micro_batch: dict[str, Any]) -> torch.Tensor:
        """What stands at the positions that emit the tokens of the responses, (N, T)."""
        if self.config.padding_free:
            present = micro_batch["attention_mask"].bool()
            along = torch.full(present.shape, torch.nan, device=column.device)
            along[present.to(column.device)] = column[0]
            column = along
        return column[:, -self._length(micro_batch) - 1 : -1]

    def _length(self, micro_batch: dict[str, Any]) -> int:
        return int(micro_batch["responses"].size(-1))

    def _dark(self, micro_batch: dict[str, Any], options: SignalOptions) -> dict[str, Any]:
        assert self._told is not None
        step, black = self._told["step"], self._told["black"]
        rows = [perturb_row(row, options, step, black) for row in _rows_of_images(micro_batch)]
        return {**micro_batch, "multi_modal_inputs": rows}


def _rows_of_images(micro_batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = micro_batch.get("multi_modal_inputs")
    return [dict(row or {}) for row in given] if given is not None else [{}] * len(micro_batch["input_ids"])
