"""Every pass that TRL asks log-probabilities of: over a rollout, for the loss, or over anything else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vgr_trl.compat.token_types import with_causal_completions
from vgr_trl.sharing import SharingPlan, whole_groups
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals import Measurement
from vgr_trl.signals.head import Head
from vgr_trl.training.host import Host
from vgr_trl.training.metrics.clock import StageClock
from vgr_trl.training.passes.around import Passes
from vgr_trl.training.passes.budget import TokenBudget
from vgr_trl.training.passes.skip import LivePasses, Scored
from vgr_trl.training.regions import region_mask
from vgr_trl.training.rollout import Rollout, TrainingPass

_STAGES = {"policy": "old_logps", "reference": "reference", "other": "values"}


class ScoringPasses:
    """Computes each prompt once; measures the policy's pass over a rollout; trains what is live.

    Args:
        host: where it runs.
        measurement: what is measured of rollout batches.
        sharing: where prompts are computed once.
        passes: what is around each pass.
        live: those of the loss.
        budget: of tokens in a pass.
        clock: of the run.
    """

    def __init__(
        self,
        host: Host,
        measurement: Measurement,
        sharing: SharingPlan,
        passes: Passes,
        live: LivePasses,
        budget: TokenBudget,
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
        passed: TrainingPass | None,
    ) -> Scored:
        """Return what TRL's `_get_per_token_logps_and_entropies` does.

        Args:
            model: passed through.
            plain: TRL's method.
            inputs: its named arguments but for these two; token types that let completions see their future are
                corrected.
            batch_size: rows of a chunk; a pass without gradients takes whole groups, so that there is something to
                share.
            rollout: at hand.
            passed: the micro-batch whose loss is computed.
        """
        completion = inputs["logits_to_keep"]
        inputs = with_causal_completions(inputs, causal_model(model).config, completion)
        if not torch.is_grad_enabled():
            whose = self._host.whose(model)
            with self._clock.stage(_STAGES[whose], self._host.mode == "train"):
                score = partial(plain, model, **inputs, batch_size=batch_size and self._chunk(inputs, batch_size))
                return self._score(rollout, whose, model, inputs, score)
        if passed is not None and model is passed.model:
            return self._live.run(passed, model, plain, inputs)
        with self._passes.around(self._sharing.training, model, completion):
            return plain(model, **inputs, batch_size=batch_size)

    def _chunk(self, inputs: dict[str, Any], batch_size: int) -> int:
        """Rows of a chunk, of which TRL takes `batch_size`."""
        size = self._host.num_generations
        if self._sharing.scoring.reason_off is None:
            batch_size = whole_groups(batch_size, size)
        return self._budget.scored_rows(batch_size, inputs["input_ids"].size(1), inputs["logits_to_keep"], size)

    def _score(
        self,
        rollout: Rollout | None,
        whose: str,
        model: nn.Module,
        inputs: dict[str, Any],
        score: Callable[..., Scored],
    ) -> Scored:
        ids, mask, completion = inputs["input_ids"], inputs["attention_mask"], inputs["logits_to_keep"]
        by_policy = whose == "policy"
        if rollout is not None and by_policy and self._live.gives_old_logps(rollout):
            return torch.full((len(ids), completion), torch.nan, device=ids.device), None, None
        with self._passes.around(self._sharing.scoring, model, completion):
            if rollout is not None and by_policy and rollout.signals is None and self._measurement.wanted.scoring:
                scored, measured = self._measurement.measure(
                    model,
                    ids,
                    mask,
                    completion,
                    partial(score, compute_entropy=True),
                    generated_mass=rollout.generated_mass,
                    rows_with_maps=rollout.recorded or (),
                    region=region_mask(rollout, self._host, self._measurement, ids[:, :-completion]),
                )
                rollout.signals, rollout.prompt_mass = measured.signals, measured.prompt_mass
                rollout.maps = measured.maps
                rollout.values, rollout.hidden = self._passes.values.take(), self._passes.hidden.take()
                return scored
            scored = score()
            if rollout is not None and by_policy and rollout.hidden is not None and self._measurement.wanted.shift:
                rollout.shift = self._shift(model, rollout)
            if rollout is not None and whose == "reference":
                rollout.reference_logps, rollout.reference_hidden = scored[0], self._passes.hidden.take()
            return scored

    def _shift(self, model: Any, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """How the latest pass, whose first rows are under the perturbation, differs from that over the rollout."""
        hidden, others = rollout.hidden, self._passes.hidden.take()
        assert hidden is not None
        assert others is not None
        assert rollout.signals is not None
        head = Head(causal_model(model), self._passes.hidden.output_type)
        mask = rollout.signals.mask.bool()
        return head.shift(hidden, others[: len(mask)], mask, self._host.args.temperature)
