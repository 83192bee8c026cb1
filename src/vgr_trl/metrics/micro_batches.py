"""Metrics of the micro-batches between two logs, weighted by their tokens."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vgr_trl.scoring_inputs import valid_tokens

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig

_VALID_MEANS = ("entropy_penalty", "perception_loss", "perturbed_entropy", "kl")
_PHI = "vespo/phi_seq_mean"
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by their mean, weighted by tokens.

    Args:
        metrics: values by name; a metric without one value per micro-batch stays unchanged.
        names: the metrics to average.
        counts: tokens of each micro-batch, over all processes.
    """
    for name in names:
        values = metrics.get(name, [])
        if len(values) != len(counts):
            continue
        pairs = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
        if total := sum(count for _, count in pairs):
            metrics[name] = [sum(value * count for value, count in pairs) / total]


class StepMetrics:
    """Counts and means of the micro-batches since the last log.

    Attributes:
        prompts_too_long: skipped prompts of a stream, in the whole run.
        rows_replaced: rows of this process since the last micro-batch that replaced rows with damaged images.
        updates_skipped: updates since the last log that were skipped because their gradient was not finite.
    """

    def __init__(self, args: "DAPOConfig", accelerator: Accelerator) -> None:
        self._args, self._accelerator = args, accelerator
        # Per micro-batch: valid tokens, tokens with loss, and the count that TRL's weights of vespo are averaged over.
        self._tokens: dict[str, list[float]] = {"valid": [], "scored": [], "weighed": []}
        self._sums: Counter[str] = Counter()
        self.prompts_too_long = self.updates_skipped = self.rows_replaced = 0
        has_token_advantages = args.shapes_advantages or args.uses_critic
        by_completion = args.importance_sampling_level == "sequence" and not has_token_advantages
        self._means = ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)  # TRL's means

    def measure(
        self,
        inputs: Mapping[str, Any],
        logps: Tensor,
        trl_metrics: MutableMapping[str, list[float]],
        loss_mask: Tensor | None = None,
        rows_run: int = 0,
    ) -> dict[str, float]:
        """Count a micro-batch over all processes, and return its metrics, means over tokens with loss.

        `approx_kl` is the k3 estimate of KL(old policy ‖ policy): ratio − 1 − ln ratio with ratio = π/π_old of a token
        sampled from π_old (Schulman, http://joschu.net/blog/kl-approx.html).

        Args:
            inputs: inputs of the loss, N rows.
            logps: (N, T), log-probabilities of the training pass.
            trl_metrics: TRL's metrics. Unscored tokens add 0 to its newest means over valid tokens; these become means
                over tokens with loss, NaN without such tokens.
            loss_mask: (N, T) bool, tokens with loss; None: all valid tokens, in a pass over all rows.
            rows_run: rows of the pass, if `loss_mask` is given.
        """
        logps, mask = logps.detach(), valid_tokens(inputs)  # (N, T)
        rows_run, loss_mask = (len(mask), mask) if loss_mask is None else (rows_run, loss_mask)
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL omits them on-policy
        log_ratio = (logps - old_logps).float() * loss_mask
        counts = {
            "kl": (log_ratio.exp() - 1 - log_ratio).sum(),
            "valid": mask.sum(),
            "scored": loss_mask.sum(),
            "tokens": inputs["prompt_mask"].sum() + inputs["completion_mask"].sum(),
            "rows": len(mask),
            "rows run": rows_run,
            "replaced": self.rows_replaced,
        }
        self.rows_replaced = 0
        is_vespo = self._args.loss_type == "vespo"
        counts["phi"], counts["weighed"] = self._sum_phi(inputs, log_ratio, mask, loss_mask) if is_vespo else (0, 0)
        local = torch.stack([torch.as_tensor(count, device=logps.device).float() for count in counts.values()])
        totals = self._accelerator.reduce(local, reduction="sum").tolist()
        found = dict(zip(counts, totals, strict=True))
        self._sums.update(found)
        valid, scored = found["valid"], found["scored"]
        for name in self._means if scored != valid else ():
            if values := trl_metrics.get(name):
                values[-1] = values[-1] * valid / scored if scored else math.nan
        if values := trl_metrics.get(_PHI):
            values[-1] = found["phi"] / found["weighed"] if found["weighed"] else math.nan
        for name, each in self._tokens.items():
            each.append(found[name])
        return {"approx_kl": found["kl"] / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Merge the values of the micro-batches into one mean each, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._tokens["valid"])
        weigh_by_tokens(metrics, ("approx_kl", *self._means), self._tokens["scored"])
        weigh_by_tokens(metrics, (_PHI,), self._tokens["weighed"])
        self._tokens = {name: [] for name in self._tokens}

    def _sum_phi(
        self, inputs: Mapping[str, Any], log_ratio: Tensor, mask: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return sum and count of `vespo`'s weights over completions with loss, or over tokens if each has a weight."""
        from trl import GRPOTrainer

        advantages = inputs["advantages"].reshape(len(mask), -1)
        args, ratio = self._args, inputs.get("importance_sampling_ratio")
        bounds = args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg
        phi = GRPOTrainer.get_gamma_weights(advantages, log_ratio, mask, ratio, *bounds)
        where = loss_mask if phi.size(1) > 1 else loss_mask.any(1, keepdim=True)
        return phi.masked_fill(~where, 0).sum(), where.sum()

    def summarise_window(self, seconds: float, reward_weights: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the micro-batches since the last log, and start a new window.

        The metrics are tokens and completions per second, generation and scoring included, skipped completions and
        tokens, the weights of the rewards, and counts that are logged only if they are not 0.

        Args:
            seconds: duration of the window.
            reward_weights: weights by the names of the reward functions.
        """
        sums, self._sums = self._sums, Counter()
        logs: dict[str, float] = {
            "perf/tokens_per_second": sums["tokens"] / seconds,
            "perf/samples_per_second": sums["rows"] / seconds,
            "skipped/rows": float(sums["rows"] - sums["rows run"]),
            "skipped/tokens": float(sums["valid"] - sums["scored"]),
            **{f"reward_weights/{name}": weight for name, weight in reward_weights.items()},
        }
        sometimes = {
            "skipped/updates": self.updates_skipped,
            "data/prompts_replaced": sums["replaced"] / int(self._args.num_generations or 1),
            "data/prompts_too_long": self.prompts_too_long,
        }
        self.updates_skipped = 0
        return logs | {name: value for name, value in sometimes.items() if value}
