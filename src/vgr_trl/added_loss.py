"""What is added to TRL's loss: the KL of a run to its reference, entropy penalty, perception loss."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from vgr_trl.batch import joined, scoring_inputs, valid_tokens
from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.loss import (
    AdaptiveKLController,
    FixedKLController,
    entropy_penalty,
    kl_penalty,
    perception_divergence,
    perception_loss,
)
from vgr_trl.measure import HiddenStateHook
from vgr_trl.metrics import Totals
from vgr_trl.patches import average_as_loss
from vgr_trl.rollout import ConstructedTrainer, Rollout, TrainingPass
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.scoring import Head
from vgr_trl.utils import ConfigError, patched_attribute

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)


class FullKL:
    """Takes hidden states through the heads of two models, some positions at a time.

    Attributes:
        hook: keeps the hidden states.

    Args:
        reference: likewise; None: the policy without its adapter, which must leave the head as it is.

    Raises:
        ConfigError: the adapter changes the head.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module | None, temperature: float) -> None:
        causal = causal_model(policy)
        if reference is None and isinstance(causal.get_output_embeddings(), AuxiliaryTrainingWrapper):
            raise ConfigError(
                "kl_penalty is full with an adapter that trains the model's head, which the reference would have too: "
                "leave the head out of modules_to_save, or use low_var_kl."
            )
        self._policy, self._reference = causal, causal if reference is None else causal_model(reference)
        self._temperature, self.hook = temperature, HiddenStateHook()

    def between(self, hidden: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the divergence at every position (N, T), 0 where `mask` is False; with gradients of the policy.

        Args:
            hidden: (N, T', D) of the policy; T' is T, or less if the others are not in the mask.
            reference: (N, T, D).
            mask: (N, T) bool.
        """
        found = torch.zeros(mask.shape, device=hidden.device)
        mine = hidden[mask[:, : hidden.size(1)]]  # (K, D)
        heads = Head(self._policy, self.hook.output_type), Head(self._reference, self.hook.output_type)
        size = heads[0].positions_at_a_time(hidden.device)
        parts = [
            checkpoint(self._of_positions, *heads, *part, use_reentrant=False)
            for part in zip(mine.split(size), reference[mask].split(size), strict=True)
        ]
        return found.masked_scatter(mask, torch.cat(parts)) if len(mine) else found

    def _of_positions(
        self, policy: Head, reference: Head, hidden: torch.Tensor, reference_hidden: torch.Tensor
    ) -> torch.Tensor:
        logits = policy.logits(hidden).float() / self._temperature
        with torch.no_grad():
            theirs = reference.logits(reference_hidden.to(hidden.dtype)).float() / self._temperature
        return kl_penalty(logits.unsqueeze(0), theirs.unsqueeze(0), "full").squeeze(0)


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
    with patched_attribute(args, "beta", 1.0), patched_attribute(args, "reward_weights", weights):
        yield


@contextmanager
def scored_by_reference(trainer: ConstructedTrainer) -> Iterator[None]:
    """Let TRL score rollouts of this block by the reference too, if a KL needs it."""
    if trainer.args.kl_coef == 0 or not trainer.model.training:
        yield
        return
    with patched_attribute(trainer, "beta", 1.0):
        yield


class KLControl:
    """Takes the KL of a run from its rewards, or adds it to its loss, and lets the coefficient follow."""

    def __init__(self, args: DAPOConfig, accelerator: Accelerator, full: FullKL | None) -> None:
        self.args, self.accelerator, self.full = args, accelerator, full
        self.controller: AdaptiveKLController | FixedKLController = FixedKLController(args.kl_coef)
        if args.kl_type == "adaptive":
            self.controller = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        self._forget()

    def _forget(self) -> None:
        self._sum, self._completions, self._largest = 0.0, 0, -math.inf  # since the last update

    def penalise(self, rollout: Rollout) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the column that `kl_penalty_reward` reads, and metrics; both empty where there is no penalty.

        Args:
            rollout: scored by the policy and its reference; keeps the penalty of each token.
        """
        if not self.args.penalises_kl or rollout.reference_logps is None:
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
        return self._update() if self.args.penalises_kl else {}

    def without_unscored(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return rewards (N of all, F) in which a completion that no other reward applies to has no penalty either.

        Args:
            rewards: the last column is that of the penalty, where there is one.
        """
        if not self.args.penalises_kl:
            return rewards
        unscored = rewards[:, :-1].isnan().all(dim=1)
        penalties = rewards[:, -1].masked_fill(unscored, torch.nan)
        return torch.cat([rewards[:, :-1], penalties.unsqueeze(1)], dim=1)

    def keep_reference(self, rollout: Rollout) -> None:
        """Put the reference's hidden states into the batch of a judged rollout, if a loss over all words needs them."""
        if self.full is not None and rollout.reference_hidden is not None:
            rollout.batch["reference_hidden"] = rollout.reference_hidden.transpose(1, 2).contiguous()  # (N, D, T)
        rollout.reference_hidden = None

    def term(self, passed: TrainingPass) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Return the loss of every token of a micro-batch (N, T), 0 outside its mask, and metrics."""
        if not self.args.has_kl_loss:
            return None, {}
        assert passed.logps is not None
        mask, coefficient = valid_tokens(passed.inputs).bool(), self.controller.coefficient
        if self.full is None:
            kl = self._kl(passed.logps, passed.inputs["ref_per_token_logps"], mask)
        else:
            assert passed.hidden is not None
            kl = self.full.between(passed.hidden, passed.inputs["reference_hidden"].transpose(1, 2), mask)
        metrics = self._measured(kl.detach(), mask)
        if self.accelerator.sync_gradients:
            metrics |= self._update()
        return coefficient * kl, metrics

    def _kl(self, logps: torch.Tensor, reference_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return kl_penalty(logps.masked_fill(~mask, 0), reference_logps.masked_fill(~mask, 0), self.args.kl_penalty)

    def _measured(self, kl: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        totals, accelerator = Totals(), self.accelerator
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

    def save(self, folder: Path) -> None:
        """Write the coefficient into a checkpoint, if it follows."""
        if self.args.kl_coef > 0 and self.args.kl_type == "adaptive":
            accelerator = self.accelerator
            save_share(
                dict(self.controller.state_dict()), folder, accelerator.process_index, accelerator.num_processes, "kl"
            )

    def load(self, folder: Path) -> None:
        """Continue with the coefficient of a checkpoint, which any number of processes may have written."""
        if self.args.kl_coef == 0 or self.args.kl_type == "fixed":
            return
        if shares := load_shares(folder, "kl"):
            self.controller.load_state_dict(shares[0])
        elif self.accelerator.is_main_process:
            logger.warning(
                f"{folder} has no coefficient of the KL, which starts at kl_coef: the checkpoint was written without "
                "an adaptive one."
            )


def what_reads_every_token(args: DAPOConfig) -> str | None:
    """Return the option by which tokens that have no advantage are trained on too, a term of the loss or a critic."""
    terms = {
        "beta": args.beta != 0,
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "use_entropy_penalty": args.use_entropy_penalty,
        "perception_loss_weight": args.perception_loss_weight > 0,
        "der_loss_weight1": args.der_loss_weight1 > 0,
        "der_loss_weight2": args.der_loss_weight2 > 0,
        "kl_coef": args.has_kl_loss,
        "advantage_estimator": args.uses_critic,
    }
    return next((name for name, is_on in terms.items() if is_on), None)


def added_loss(trainer: "DAPOTrainer", passed: TrainingPass) -> tuple[torch.Tensor | float, dict[str, float]]:
    """Return the terms of a micro-batch that are no advantages, averaged as TRL averages its own loss, and metrics."""
    args, accelerator, totals = trainer.args, trainer.accelerator, Totals()
    of_kl, metrics = trainer.kl.term(passed)
    each = (entropy_term(passed, args, totals), perception_term(trainer, passed, totals), of_kl)
    terms = [term for term in each if term is not None]  # (N, T) each
    if not terms:
        return 0.0, metrics
    average = average_as_loss(
        torch.stack(terms).sum(dim=0),
        valid_tokens(passed.inputs),
        passed.inputs,
        args,
        accumulation_steps=trainer.current_gradient_accumulation_steps,
        num_processes=accelerator.num_processes,
    )
    return average, metrics | totals.metrics(accelerator.gather)


def entropy_term(passed: TrainingPass, args: DAPOConfig, totals: Totals) -> torch.Tensor | None:
    """Return the entropy penalty of every token of a micro-batch (N, T), None if it is off; `totals` get its mean."""
    if not args.use_entropy_penalty:
        return None
    assert passed.logps is not None
    mask = valid_tokens(passed.inputs)
    penalty = entropy_penalty(passed.logps, mask, args.entropy_penalty_coef)
    totals.add_mean("entropy_penalty", penalty.detach(), mask.bool())
    return penalty


def perception_term(trainer: "DAPOTrainer", passed: TrainingPass, totals: Totals) -> torch.Tensor | None:
    """Return the perception loss of PAPO of every token of a micro-batch (N, T); None if it is off.

    It is the one term that takes another pass with gradients, through the perturbed images.
    """
    args = trainer.args
    if not (args.uses_perception_loss or args.der_loss_weight1 > 0):
        return None
    assert passed.logps is not None
    inputs, logps, mask = passed.inputs, passed.logps, valid_tokens(passed.inputs)
    perturbed_logps = logps
    if args.uses_perception_loss:
        pixels = inputs.get("perturbed_pixel_values")
        perturbed = scoring_inputs(inputs if pixels is None else inputs | {"pixel_values": joined(pixels)})
        score = trainer._get_per_token_logps_and_entropies
        perturbed_logps, entropies, _ = score(passed.model, **perturbed, compute_entropy=True)
        divergence = perception_divergence(logps.detach(), perturbed_logps.detach(), mask)
        totals.add_mean("perturbed_entropy", entropies.detach(), mask.bool())
        totals.add_mean("perception_loss", -divergence, mask.bool())
    return perception_loss(
        logps,
        perturbed_logps,
        mask,
        coefficient=args.perception_loss_weight,
        entropy_coefficient=args.der_loss_weight1,
        perturbed_entropy_coefficient=args.der_loss_weight2,
    )
