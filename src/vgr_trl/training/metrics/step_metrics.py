"""What is measured of a training step besides TRL's own metrics."""

import math
from collections.abc import Iterable, MutableMapping, Sequence

import torch

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.config import DAPOConfig
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import TrainingPass

_VALID_MEANS = ("entropy_penalty", "perception_loss", "perturbed_entropy", "kl", "kl/mean")
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def approximate_kl(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return per completion the sum over its valid tokens of the k3 estimate of KL(old policy ‖ policy).

    k3 = ratio − 1 − ln ratio with ratio = π/π_old of a token sampled from π_old, never negative and unbiased
    (Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        logps: log-probabilities under the policy, (N, T).
        old_logps: those under the policy that generated the tokens, (N, T).
        mask: valid tokens, (N, T).

    Returns:
        (N,), at least 0.
    """
    log_ratio = (logps - old_logps).float() * mask
    return (log_ratio.exp() - 1 - log_ratio).sum(dim=1)


def live_means(args: DAPOConfig) -> tuple[str, ...]:
    """Return TRL's metrics of a micro-batch that are means over the tokens which train.

    Args:
        args: of the trainer; with importance ratios of sequences, what is clipped is counted by completions.
    """
    by_completion = args.importance_sampling_level == "sequence" and not args.has_token_advantages
    return ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)


def over_live_tokens(
    metrics: MutableMapping[str, list[float]], names: Iterable[str], valid: float, live: float
) -> None:
    """Make the newest means over valid tokens, of which those that are not live count as 0, means over live tokens.

    Args:
        valid, live: tokens of the newest micro-batch, over all processes; of no live token the mean is NaN.
    """
    for name in names:
        if values := metrics.get(name):
            values[-1] = values[-1] * valid / live if live else math.nan


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by one mean in which every token counts the same.

    Args:
        metrics: values by name; those that do not have one value for each micro-batch stay as they are.
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
    """Counts and means of the micro-batches since the last log."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._valid: list[float] = []  # tokens of each micro-batch that count in the loss
        self._live: list[float] = []  # those of them that were scored
        self._tokens = self._samples = self._skipped_rows = self._skipped_tokens = 0.0
        self._prompts_too_long = 0  # of streams, in the whole run
        self._updates_left_out = 0

    def count_prompt_too_long(self) -> None:
        """Count a prompt of a stream that is left out."""
        self._prompts_too_long += 1

    def count_update_left_out(self) -> None:
        """Count a step that changes nothing because its gradient is not finite."""
        self._updates_left_out += 1

    def measure(self, passed: TrainingPass, of_trl: MutableMapping[str, list[float]] | None = None) -> dict[str, float]:
        """Count a micro-batch, over all processes, and return its metrics, which are means over its live tokens.

        Args:
            of_trl: TRL's metrics, of which the newest values are made such means, too.
        """
        assert passed.logps is not None
        inputs, logps = passed.inputs, passed.logps.detach()
        mask = valid_tokens(inputs)  # (N, T)
        live = mask if passed.live is None else passed.live
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, live)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        rows = len(mask)
        counts = [mask.sum(), live.sum(), tokens, rows, rows if passed.live is None else passed.rows_run]
        local = torch.stack([kl.sum(), *(torch.as_tensor(count, device=kl.device).float() for count in counts)])
        kl_sum, valid, scored, all_tokens, all_rows, run = self.host.accelerator.reduce(local, reduction="sum").tolist()
        if scored != valid:
            over_live_tokens({} if of_trl is None else of_trl, live_means(self.host.args), valid, scored)
        self._valid.append(valid)
        self._live.append(scored)
        self._tokens += all_tokens
        self._samples += all_rows
        self._skipped_rows += all_rows - run
        self._skipped_tokens += valid - scored
        return {"approx_kl": kl_sum / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._valid)
        weigh_by_tokens(metrics, ("approx_kl", *live_means(self.host.args)), self._live)
        self._valid.clear()
        self._live.clear()

    def of_window(self, seconds: float) -> dict[str, float]:
        """Return what is logged of the micro-batches since the last log, and of the run; start a new window.

        Those are tokens and completions per second, generation and scoring included; completions that did not run and
        tokens that were not scored; the weights of the rewards.
        """
        weights = zip(self.host.reward_names, self.host.reward_weights.tolist(), strict=True)
        found = {
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/samples_per_second": self._samples / seconds,
            "skipped/rows": self._skipped_rows,
            "skipped/tokens": self._skipped_tokens,
            **{f"reward_weights/{name}": weight for name, weight in weights},
        }
        if self._updates_left_out:
            found["skipped/updates"] = self._updates_left_out
        if self._prompts_too_long:
            found["data/prompts_too_long"] = self._prompts_too_long
        self._tokens = self._samples = self._skipped_rows = self._skipped_tokens = 0.0
        self._updates_left_out = 0
        return found
