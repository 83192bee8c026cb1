"""The KL divergence of the policy from its reference in a run: in the loss, or among the rewards."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.config import DAPOConfig
from vgr_trl.credit.kl import AdaptiveKLController, FixedKLController, kl_penalty
from vgr_trl.credit.totals import Totals
from vgr_trl.replacing import replaced
from vgr_trl.training.checkpoints.shares import load_shares, save_share
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.full_kl import FullKL
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout, TrainingPass

logger = logging.get_logger(__name__)


def kl_penalty_reward(
    completions: list[Any], kl_penalty: list[float] | None = None, **columns: Any
) -> list[float | None]:
    """Return what the KL takes from each completion's reward, None where no reference was asked (evaluation)."""
    return [None] * len(completions) if kl_penalty is None else list(kl_penalty)


PENALTY = kl_penalty_reward.__name__


@contextmanager
def constructed_with_reference(args: DAPOConfig) -> Iterator[None]:
    """Let TRL build a reference in this block if a KL needs one, and take the weight of the penalty as 1.

    TRL builds a reference, or keeps a copy of the adapter, where its own `beta` is not 0.
    """
    if args.kl_coef == 0:
        yield
        return
    weights = args.reward_weights
    if args.penalises_kl and weights is not None:
        weights = [*weights, 1.0]
    with replaced(args, "beta", 1.0), replaced(args, "reward_weights", weights):
        yield


@contextmanager
def scored_by_reference(trainer: ConstructedTrainer) -> Iterator[None]:
    """Let TRL score rollouts of this block by the reference too, if a KL needs it."""
    if trainer.args.kl_coef == 0 or not trainer.model.training:
        yield
        return
    with replaced(trainer, "beta", 1.0):
        yield


class KLControl:
    """Takes the KL of a run from its rewards, or adds it to its loss, and lets the coefficient follow."""

    def __init__(self, host: Host, full: FullKL | None) -> None:
        self.host, self.full, args = host, full, host.args
        self.controller: AdaptiveKLController | FixedKLController = FixedKLController(args.kl_coef)
        if args.kl_type == "adaptive":
            self.controller = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        self._forget()

    def _forget(self) -> None:
        self._sum, self._completions, self._largest = 0.0, 0, -math.inf  # since the last update

    # Among the rewards

    def penalise(self, rollout: Rollout) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the column that `kl_penalty_reward` reads, and metrics; both empty where there is no penalty.

        Args:
            rollout: scored by the policy and its reference; keeps the penalty of each token.
        """
        if not self.host.args.penalises_kl or rollout.reference_logps is None:
            return {}, {}
        assert rollout.signals is not None
        mask = rollout.signals.mask.bool()
        if self.full is None:
            kl = self._kl(rollout.signals.logps, rollout.reference_logps, mask)  # (N, T)
        else:
            assert rollout.hidden is not None
            assert rollout.reference_hidden is not None
            with torch.no_grad():
                kl = self.full.between(rollout.hidden, rollout.reference_hidden, mask)
            rollout.reference_hidden = None
        rollout.kl_penalty = -self.controller.coefficient * kl
        return {"kl_penalty": rollout.kl_penalty.sum(dim=1).tolist()}, self._measured(kl, mask)

    def end_rollout(self) -> dict[str, float]:
        """Let the coefficient follow the completions of a rollout, those of its further rounds too; return metrics."""
        return self._update() if self.host.args.penalises_kl else {}

    def without_unscored(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return rewards (N of all, F) in which a completion that no other reward applies to has no penalty either.

        Args:
            rewards: the last column is that of the penalty, where there is one.
        """
        if not self.host.args.penalises_kl:
            return rewards
        unscored = rewards[:, :-1].isnan().all(dim=1)
        penalties = rewards[:, -1].masked_fill(unscored, torch.nan)
        return torch.cat([rewards[:, :-1], penalties.unsqueeze(1)], dim=1)

    # In the loss

    def keep_reference(self, rollout: Rollout) -> None:
        """Put the reference's hidden states into the batch of a judged rollout, if a loss over all words needs them."""
        if self.full is not None and rollout.reference_hidden is not None:
            rollout.batch["reference_hidden"] = rollout.reference_hidden.transpose(1, 2).contiguous()  # (N, D, T)
        rollout.reference_hidden = None

    def term(self, passed: TrainingPass) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Return the loss of every token of a micro-batch (N, T), 0 outside its mask, and metrics."""
        if not self.host.args.has_kl_loss:
            return None, {}
        assert passed.logps is not None
        mask, coefficient = valid_tokens(passed.inputs).bool(), self.controller.coefficient
        if self.full is None:
            kl = self._kl(passed.logps, passed.inputs["ref_per_token_logps"], mask)
        else:
            assert passed.hidden is not None
            kl = self.full.between(passed.hidden, passed.inputs["reference_hidden"].transpose(1, 2), mask)
        metrics = self._measured(kl.detach(), mask)
        if self.host.accelerator.sync_gradients:
            metrics |= self._update()
        return coefficient * kl, metrics

    # Both

    def _kl(self, logps: torch.Tensor, reference_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return kl_penalty(logps.masked_fill(~mask, 0), reference_logps.masked_fill(~mask, 0), self.host.args.kl_penalty)

    def _measured(self, kl: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        totals, accelerator = Totals(), self.host.accelerator
        totals.add_mean("kl/mean", kl, mask)
        totals.add_largest("kl/max", kl, mask)
        means = kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # (N,)
        totals.add_mean("kl/completion", means, mask.any(dim=1))
        metrics = totals.metrics(accelerator.gather)
        largest, mean = metrics.pop("kl/max"), metrics["kl/completion"]
        if not math.isnan(mean):
            rows = len(kl) * accelerator.num_processes
            self._sum += mean * rows
            self._completions += rows
            self._largest = max(self._largest, largest)
        return metrics

    def _update(self) -> dict[str, float]:
        metrics = {"kl/coefficient": self.controller.coefficient}
        if self._completions:
            self.controller.update(self._sum / self._completions, self._completions)
            metrics["kl/max"] = self._largest
        self._forget()
        return metrics

    # What is saved

    def save(self, folder: Path) -> None:
        """Write the coefficient into a checkpoint, if it follows."""
        if self.host.args.kl_coef > 0 and self.host.args.kl_type == "adaptive":
            accelerator = self.host.accelerator
            save_share(
                dict(self.controller.state_dict()), folder, accelerator.process_index, accelerator.num_processes, "kl"
            )

    def load(self, folder: Path) -> None:
        """Continue with the coefficient of a checkpoint, which any number of processes may have written."""
        if self.host.args.kl_coef == 0 or self.host.args.kl_type == "fixed":
            return
        if shares := load_shares(folder, "kl"):
            self.controller.load_state_dict(shares[0])
        elif self.host.accelerator.is_main_process:
            logger.warning(
                f"{folder} has no coefficient of the KL, which starts at kl_coef: the checkpoint was written without "
                "an adaptive one."
            )
