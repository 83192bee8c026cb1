"""Passes without gradients that TRL asks log-probabilities of: over a rollout, or over anything else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vgr_trl.errors import NotFiniteError
from vgr_trl.sharing import SharingPlan, whole_groups
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals import Measurement
from vgr_trl.signals.head import Head, leaves_rows_out
from vgr_trl.training.host import Host
from vgr_trl.training.metrics.clock import StageClock
from vgr_trl.training.passes.around import Passes
from vgr_trl.training.passes.budget import TokenBudget
from vgr_trl.training.passes.skip import LivePasses, Scored
from vgr_trl.training.regions import region_mask
from vgr_trl.training.rollout import Rollout

_STAGES = {"policy": "old_logps", "reference": "reference", "other": "values"}


class ScoringPasses:
    """Computes each prompt once; measures the policy's pass over a rollout."""

    def __init__(
        self,
        host: Host,
        measurement: Measurement,
        sharing: SharingPlan,
        passes: Passes,
        live: LivePasses,
        budget: TokenBudget | None,
        clock: StageClock,
    ) -> None:
        self._host, self._measurement, self._sharing = host, measurement, sharing
        self._passes, self._live, self._budget, self._clock = passes, live, budget, clock

    def run(
        self,
        model: nn.Module,
        plain: Callable[..., Scored],
        inputs: dict[str, Any],
        batch_size: int | None,
        rollout: Rollout | None,
    ) -> Scored:
        """Return what TRL's `_get_per_token_logps_and_entropies` does, without gradients.

        Args:
            batch_size: rows of a chunk, made whole groups, so that there is something to share.
        """
        whose = self._host.whose(model)
        with self._clock.stage(_STAGES[whose], self._host.mode == "train"):
            rows = batch_size and self._chunk(inputs, batch_size)
            score = partial(self._without_nan, partial(plain, model, **inputs, batch_size=rows), model, inputs)
            return self._score(rollout, whose, model, inputs, score)

    def _chunk(self, inputs: dict[str, Any], batch_size: int) -> int:
        """Rows of a chunk, of which TRL takes `batch_size`."""
        size = self._host.num_generations
        if self._sharing.scoring.reason_off is None:
            batch_size = whole_groups(batch_size, size)
        if self._budget is None:
            return batch_size
        return self._budget.scored_rows(batch_size, inputs["input_ids"].size(1), inputs["logits_to_keep"], size)

    def _score(
        self,
        rollout: Rollout | None,
        whose: str,
        model: nn.Module,
        inputs: dict[str, Any],
        score: Callable[..., Scored],
    ) -> Scored:
        ids, completion = inputs["input_ids"], inputs["logits_to_keep"]
        measured = rollout if whose == "policy" else None
        if measured is not None and self._live.gives_old_logps(measured):
            return torch.full((len(ids), completion), torch.nan, device=ids.device), None, None
        with self._passes.around(self._sharing.scoring, model, completion):
            if measured is not None and measured.signals is None and self._measurement.wanted.scoring:
                return self._measure(measured, model, inputs, score)
            scored = score()
            if measured is not None and measured.hidden is not None and self._measurement.wanted.shift:
                measured.shift = self._shift(model, measured)
            if rollout is not None and whose == "reference":
                rollout.reference_logps, rollout.reference_hidden = scored[0], self._passes.hidden.take()
            return scored

    def _measure(
        self, rollout: Rollout, model: nn.Module, inputs: dict[str, Any], score: Callable[..., Scored]
    ) -> Scored:
        ids, completion = inputs["input_ids"], inputs["logits_to_keep"]
        scored, found = self._measurement.measure(
            model,
            ids,
            inputs["attention_mask"],
            completion,
            partial(score, compute_entropy=True),
            generated_mass=rollout.generated_mass,
            rows_with_maps=rollout.recorded or (),
            region=region_mask(rollout, self._host, self._measurement, ids[:, :-completion]),
        )
        rollout.signals, rollout.prompt_mass, rollout.maps = found.signals, found.prompt_mass, found.maps
        rollout.values, rollout.hidden = self._passes.values.take(), self._passes.hidden.take()
        return scored

    def _without_nan(
        self, score: Callable[..., Scored], model: nn.Module, inputs: dict[str, Any], **options: Any
    ) -> Scored:
        """Refuse log-probabilities that are NaN: signals of them would be taken for those of rows without images."""
        scored = score(**options)
        valid = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].bool()
        if not leaves_rows_out(model) and (count := int((scored[0].isnan() & valid).any(dim=1).sum())):
            raise NotFiniteError(
                f"The model's log-probabilities of {count} of {len(valid)} completions are NaN, at step "
                f"{self._host.state.global_step + 1}: its weights are broken, or what it computes overflows, so look "
                "at the newest checkpoint, or use bfloat16 instead of float16."
            )
        return scored

    def _shift(self, model: nn.Module, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """How the latest pass, whose first rows are under the perturbation, differs from that over the rollout."""
        hidden, others = rollout.hidden, self._passes.hidden.take()
        assert hidden is not None
        assert others is not None
        assert rollout.signals is not None
        head = Head(causal_model(model), self._passes.hidden.output_type)
        mask = rollout.signals.mask.bool()
        return head.shift(hidden, others[: len(mask)], mask, self._host.args.temperature)
