"""Loss terms beside TRL's: KL divergences of all kinds, perception loss, entropy penalty; and signs of a collapse.

Terms are per token, (N, T), and 0 on invalid tokens: the caller sums and divides them as it does its policy loss.
`KLControl` and `auxiliary_loss` are those of a run of `DAPOTrainer`; nothing here needs TRL to be imported.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from accelerate import Accelerator
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.config import KLKind
from vgr_trl.metrics import Totals
from vgr_trl.pixels import joined
from vgr_trl.rows import scoring_inputs, valid_tokens
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.ratios import visual_dependency
from vgr_trl.signals.scoring import Head
from vgr_trl.utils import ConfigError, DataError, patched_attribute

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.rollout import ConstructedTrainer, Rollout, TrainingPass

logger = logging.get_logger(__name__)

KINDS = get_args(KLKind)
_LARGEST = 10.0  # of `low_var_kl`
_LARGEST_DIFFERENCE = 20.0
_ROUNDING = 1e-6  # below it the sign of a difference is that of float32 rounding


def kl_penalty(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str = "low_var_kl") -> torch.Tensor:
    """Return an estimate of KL(policy ‖ reference) for every token, as EasyR1 and verl define its kinds.

    With d = log π − log π_ref of the sampled token: `kl` is d (k1), `abs` |d| with gradient 0 where |d| < 1e-6,
    `mse` d²/2 (k2), `low_var_kl` is exp(−d) + d − 1 with d clamped to ±20 and the result to 10 (k3; Schulman,
    http://joschu.net/blog/kl-approx.html).
    `full` is the divergence itself, Σ_v π(v) (log π(v) − log π_ref(v)), from the logits of all words.

    Args:
        logps: log-probabilities (N, T) of the tokens; for `full` logits (N, T, vocabulary).
        ref_logps: of the reference, the same shape.
        kind: one of `KINDS`.

    Returns:
        (N, T) float32, with gradients.

    Raises:
        ConfigError: `kind` is unknown.
        DataError: the tensors do not fit `kind`.
    """
    if kind not in KINDS:
        raise ConfigError(f"The kind of KL is {kind!r}: give one of {', '.join(KINDS)}.")
    if (logps.ndim == 3) != (kind == "full"):
        wanted = "logits (N, T, vocabulary)" if kind == "full" else "log-probabilities (N, T)"
        raise DataError(f"kl_penalty got a tensor of shape {tuple(logps.shape)} for {kind}: give {wanted}.")
    logps, ref_logps = logps.float(), ref_logps.float()
    if kind == "full":
        logps, ref_logps = logps.log_softmax(-1), ref_logps.log_softmax(-1)
        return (logps.exp() * (logps - ref_logps)).sum(-1)
    difference = logps - ref_logps  # (N, T)
    if kind == "kl":
        return difference
    if kind == "abs":
        size = difference.abs()
        return torch.where(size < _ROUNDING, size.detach(), size)
    if kind == "mse":
        return 0.5 * difference.square()
    difference = difference.clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
    return (torch.exp(-difference) + difference - 1).clamp(max=_LARGEST)


class AdaptiveKLController:
    """A coefficient that rises while the KL is above its target and falls while it is below.

    After each update it is multiplied by 1 + clip(KL / target − 1, −0.2, 0.2) · samples / horizon (Ziegler et al.,
    2019, https://arxiv.org/abs/1909.08593).

    Args:
        coefficient: at the start, at least 0.
        target: KL to be kept, in nats, above 0.
        horizon: completions over which the coefficient follows, above 0; infinity: it stays as it is.
    """

    def __init__(self, coefficient: float, target: float = 6.0, horizon: float = 10_000) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Take in the mean KL of `num_samples` completions; both must be the same on every process."""
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_samples / self.horizon


def perception_divergence(logps: torch.Tensor, perturbed_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of the policy that sees the image from itself with the perturbed one, token by token.

    It is the `visual_dependency` with gradients, which are 0 where that is clamped (at 10, or at a difference of 20).

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.

    Returns:
        (N, T) float32 in [0, 10], 0 outside `mask`.
    """
    mask = mask.bool()
    return visual_dependency(logps.masked_fill(~mask, 0), perturbed_logps.masked_fill(~mask, 0))


def surprisal(logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return -log p of every valid token, 0 elsewhere: for tokens that the policy has sampled, a guess of its entropy.

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
    """
    return -logps.float().masked_fill(~mask.bool(), 0)


def perception_loss(
    logps: torch.Tensor,
    perturbed_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    coefficient: float = 0.01,
    entropy_coefficient: float = 0.0,
    perturbed_entropy_coefficient: float = 0.0,
) -> torch.Tensor:
    """Return the implicit perception loss and double entropy loss of PAPO (https://huggingface.co/papers/2507.06448).

    -gamma · KL(original, perturbed) - eta_1 · log p_original - eta_2 · log p_perturbed: minimising it makes the
    completion depend on the image, while the entropy terms keep both distributions sharp, without which the policy can
    win by writing unrelated tokens. Gradients flow through both log-probabilities. In the published code the perturbed
    ones carry none by default, so that its entropy term on them trains nothing.

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.
        coefficient: gamma, at least 0. The paper uses 0.01 and 0.02 and saw collapse at 0.04.
        entropy_coefficient: eta_1, at least 0. The paper uses 0.03 and 0.05.
        perturbed_entropy_coefficient: eta_2, at least 0, likewise.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`.
    """
    divergence = perception_divergence(logps, perturbed_logps, mask)
    return (
        entropy_coefficient * surprisal(logps, mask)
        + perturbed_entropy_coefficient * surprisal(perturbed_logps, mask)
        - coefficient * divergence
    )


def entropy_penalty(logps: torch.Tensor, mask: torch.Tensor, coefficient: float = 0.06) -> torch.Tensor:
    """Return the entropy penalty of VPPO per token, coefficient · -log p (https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
        coefficient: at least 0.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`; its mean over the valid tokens is the penalty.
    """
    return coefficient * surprisal(logps, mask)


class FullKL:
    """Full KL between two models from their hidden states, a few positions at a time.

    Args:
        reference: None: the policy without its adapter, which must leave the head as it is.

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
        self._temperature = temperature

    def between(self, hidden: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the divergence at every position (N, T), 0 where `mask` is False; with gradients of the policy.

        Args:
            hidden: (N, T', D) of the policy; T' is T, or less if the others are not in the mask.
            reference: (N, T, D).
            mask: (N, T) bool.
        """
        found = torch.zeros(mask.shape, device=hidden.device)
        mine = hidden[mask[:, : hidden.size(1)]]  # (K, D)
        heads = Head(self._policy), Head(self._reference)
        size = heads[0].positions_at_a_time(hidden.device)
        parts = [
            checkpoint(self._kl_of_positions, *heads, *part, use_reentrant=False)
            for part in zip(mine.split(size), reference[mask].split(size), strict=True)
        ]
        return found.masked_scatter(mask, torch.cat(parts)) if len(mine) else found

    def _kl_of_positions(
        self, policy: Head, reference: Head, hidden: torch.Tensor, reference_hidden: torch.Tensor
    ) -> torch.Tensor:
        logits = policy.logits(hidden).float() / self._temperature
        with torch.no_grad():
            theirs = reference.logits(reference_hidden.to(hidden.dtype)).float() / self._temperature
        return kl_penalty(logits.unsqueeze(0), theirs.unsqueeze(0), "full").squeeze(0)


def kl_penalty_reward(
    completions: list[Any], kl_penalty: list[float] | None = None, **columns: Any
) -> list[float | None]:
    """Return what the KL takes from each completion's reward, None without a reference pass (in evaluation)."""
    return [None] * len(completions) if kl_penalty is None else list(kl_penalty)


PENALTY = kl_penalty_reward.__name__


def enable_reference_model(owner: Any, args: "DAPOConfig") -> AbstractContextManager[None]:
    """Set beta to 1 in this block if a KL needs the reference, so that TRL builds and scores it."""
    return patched_attribute(owner, "beta", 1.0) if args.kl_coef > 0 else nullcontext()


class KLControl:
    """KL penalty of a run, in its rewards or its loss, with a fixed or adaptive coefficient.

    Attributes:
        penalises, in_loss: which of the two it does, if any.
    """

    def __init__(self, args: "DAPOConfig", accelerator: Accelerator, full: FullKL | None) -> None:
        self.args, self.accelerator, self.full = args, accelerator, full
        self.penalises, self.in_loss = args.penalises_kl, args.has_kl_loss
        self.is_adaptive = args.kl_coef > 0 and args.kl_type == "adaptive"
        horizon = args.kl_horizon if self.is_adaptive else math.inf
        self.controller = AdaptiveKLController(args.kl_coef, args.kl_target, horizon)
        self._sum, self._completions, self._largest = 0.0, 0, -math.inf  # since the last update

    def penalise(self, rollout: "Rollout") -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the column that `kl_penalty_reward` reads, and metrics; both empty where there is no penalty.

        Args:
            rollout: scored by the policy and its reference; keeps the penalty of each token.
        """
        if not self.penalises or rollout.reference is None or rollout.scores is None:
            return {}, {}
        policy, reference = rollout.scores, rollout.reference
        mask = policy.mask
        if self.full is None:
            kl = self._kl(policy.logps.float(), reference.logps, mask)  # (N, T)
        else:
            assert policy.hidden is not None
            assert reference.hidden is not None
            with torch.no_grad():
                kl = self.full.between(policy.hidden, reference.hidden, mask)
        rollout.kl_penalty = -self.controller.coefficient * kl
        return {"kl_penalty": rollout.kl_penalty.sum(dim=1).tolist()}, self._measured(kl, mask)

    def drop_unscored_penalties(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return rewards (N of all, F) in which a completion that no other reward applies to has no penalty either.

        Args:
            rewards: the last column is that of the penalty, where there is one.
        """
        if not self.penalises:
            return rewards
        unscored = rewards[:, :-1].isnan().all(dim=1)
        penalties = rewards[:, -1].masked_fill(unscored, torch.nan)
        return torch.cat([rewards[:, :-1], penalties.unsqueeze(1)], dim=1)

    def keep_reference(self, rollout: "Rollout") -> None:
        """Put the reference's hidden states into the batch of a scored rollout, if a loss over all words needs them."""
        if self.in_loss and rollout.reference is not None and rollout.reference.hidden is not None:
            rollout.batch["reference_hidden"] = rollout.reference.hidden.transpose(1, 2).contiguous()  # (N, D, T)

    def term(self, passed: "TrainingPass", mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of every token of a micro-batch (N, T), 0 outside its mask, and metrics."""
        mask, coefficient = mask.bool(), self.controller.coefficient
        if self.full is None:
            kl = self._kl(passed.logps, passed.inputs["ref_per_token_logps"], mask)
        else:
            assert passed.hidden is not None
            kl = self.full.between(passed.hidden, passed.inputs["reference_hidden"].transpose(1, 2), mask)
        metrics = self._measured(kl.detach(), mask)
        if self.accelerator.sync_gradients:
            metrics |= self.update()
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

    def update(self) -> dict[str, float]:
        """Update the coefficient by the completions since the last update; return metrics."""
        metrics = {"kl/coefficient": self.controller.coefficient}
        if self._completions:
            self.controller.update(self._sum / self._completions, self._completions)
            metrics["kl/max"] = self._largest
        self._sum, self._completions, self._largest = 0.0, 0, -math.inf
        return metrics

    def save(self, folder: Path) -> None:
        """Write an adaptive coefficient into a checkpoint."""
        if self.is_adaptive:
            index, count = self.accelerator.process_index, self.accelerator.num_processes
            save_share({"coefficient": self.controller.coefficient}, folder, index, count, "kl")

    def load(self, folder: Path) -> None:
        """Continue with the coefficient of a checkpoint, which any number of processes may have written."""
        if not self.is_adaptive:
            return
        if shares := load_shares(folder, "kl"):
            self.controller.coefficient = shares[0]["coefficient"]
        elif self.accelerator.is_main_process:
            logger.warning(f"{folder} was saved without an adaptive KL coefficient, which starts at kl_coef.")


def auxiliary_loss(
    trainer: "ConstructedTrainer", passed: "TrainingPass"
) -> tuple[torch.Tensor | float, dict[str, float]]:
    """Return the terms of a micro-batch that are no advantages, averaged as TRL averages its own loss, and metrics."""
    args, accelerator, totals = trainer.args, trainer.accelerator, Totals()
    mask, terms, metrics = valid_tokens(passed.inputs), list[torch.Tensor](), dict[str, float]()  # terms (N, T) each
    if args.use_entropy_penalty:
        terms.append(entropy_penalty(passed.logps, mask, args.entropy_penalty_coef))
        totals.add_mean("entropy_penalty", terms[0].detach(), mask.bool())
    if args.perception_loss_weight > 0 or args.der_loss_weight1 > 0 or args.der_loss_weight2 > 0:
        terms.append(_perception_term(trainer, passed, mask, totals))
    if trainer.kl.in_loss:
        term, metrics = trainer.kl.term(passed, mask)
        terms.append(term)
    if not terms:
        return 0.0, metrics
    from vgr_trl.patches.trl import average_as_loss  # imports TRL, without which the formulas above are used too

    average = average_as_loss(
        torch.stack(terms).sum(dim=0),
        mask,
        passed.inputs,
        args,
        accumulation_steps=trainer.current_gradient_accumulation_steps,
        num_processes=accelerator.num_processes,
    )
    return average, metrics | totals.metrics(accelerator.gather)


def _perception_term(
    trainer: "ConstructedTrainer", passed: "TrainingPass", mask: torch.Tensor, totals: Totals
) -> torch.Tensor:
    """The perception loss of every token (N, T), the one term that takes a further pass, through perturbed images."""
    args, inputs, logps = trainer.args, passed.inputs, passed.logps
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


# Where PAPO (https://huggingface.co/papers/2507.06448) saw the perception loss won by breaking the policy.
_COLLAPSES = 0.04
_COLLAPSES_WITHOUT_ENTROPY_TERMS = 0.02  # 7B models did, 3B models did not


def coefficient_warning(
    coefficient: float, entropy_coefficient: float = 0.0, perturbed_entropy_coefficient: float = 0.0
) -> str | None:
    """Return one sentence if the perception loss has a coefficient at which the paper saw collapse, else None.

    Args:
        coefficient: weight of the perception loss (gamma), at least 0.
        entropy_coefficient: weight of the entropy of the original tokens (eta_1), at least 0.
        perturbed_entropy_coefficient: weight of the entropy given the perturbed image (eta_2), at least 0.
    """
    if coefficient >= _COLLAPSES:
        return (
            f"The coefficient of the perception loss is {coefficient}, and runs collapsed at {_COLLAPSES}: use "
            f"{_COLLAPSES_WITHOUT_ENTROPY_TERMS} or less."
        )
    if coefficient >= _COLLAPSES_WITHOUT_ENTROPY_TERMS and min(entropy_coefficient, perturbed_entropy_coefficient) <= 0:
        return (
            f"The coefficient of the perception loss is {coefficient} without both entropy terms, and 7B models "
            f"collapsed so at {_COLLAPSES_WITHOUT_ENTROPY_TERMS}: lower it, or set both entropy coefficients to about "
            "0.03."
        )
    return None
