"""KL to a reference: estimates per token, the full divergence, and the coefficient."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from accelerate import Accelerator
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from vgr_trl.checkpoints import SavedState
from vgr_trl.config import KLKind
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.loss.terms import TermInputs
from vgr_trl.metrics.step_metrics import Totals, k3
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.ratios import bounded
from vgr_trl.signals.scoring import Head, Scores

if TYPE_CHECKING:  # verl and EasyR1 read this file without TRL
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.rollout import Rollout

KINDS = get_args(KLKind)
_LARGEST = 10.0  # largest value of `low_var_kl`
_LARGEST_DIFFERENCE = 20.0
_ROUNDING = 1e-6  # smaller differences have the sign of a float32 rounding error


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: str = "low_var_kl") -> Tensor:
    """Estimate KL(policy ‖ reference) for every token, with EasyR1's and verl's kinds of estimators.

    With d = log π − log π_ref of the sampled token, `kl` is d (k1), `abs` |d| with gradient 0 where |d| < 1e-6,
    `mse` d²/2 (k2), `low_var_kl` is exp(−d) + d − 1 with d clamped to ±20 and the result to 10 (k3; Schulman,
    http://joschu.net/blog/kl-approx.html).
    `full` is the divergence itself, Σ_v π(v) (log π(v) − log π_ref(v)), from the logits of all words.

    Args:
        logps: log-probabilities (N, T) of the tokens; for `full` logits (N, T, vocabulary).
        ref_logps: log-probabilities or logits of the reference, the same shape.
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
        logps, ref_logps = bounded(logps.log_softmax(-1)), bounded(ref_logps.log_softmax(-1))
        return (logps.exp() * (logps - ref_logps)).sum(-1)
    difference = logps - ref_logps  # (N, T)
    if kind == "kl":
        return difference
    if kind == "abs":
        size = difference.abs()
        return torch.where(size < _ROUNDING, size.detach(), size)
    if kind == "mse":
        return 0.5 * difference.square()
    return k3(-difference.clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)).clamp(max=_LARGEST)


class AdaptiveKLController:
    """A coefficient that rises while the KL is above its target, and falls while the KL is below.

    After each update it is multiplied by 1 + clip(KL / target − 1, −0.2, 0.2) · samples / horizon (Ziegler et al.,
    2019, https://arxiv.org/abs/1909.08593).

    Args:
        coefficient: at the start, at least 0.
        target: KL that the control aims at, in nats, above 0.
        horizon: completions over which the coefficient follows, above 0; infinity: it is constant.
    """

    def __init__(self, coefficient: float, target: float = 6.0, horizon: float = 10_000) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Update the coefficient by the mean KL of `num_samples` completions, the same on every process."""
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, which is all that an update changes."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the coefficient of a `state_dict`."""
        self.coefficient = state["coefficient"]


class FixedKLController(AdaptiveKLController):
    """A coefficient that no update changes.

    Args:
        coefficient: at least 0.
    """

    def __init__(self, coefficient: float) -> None:
        super().__init__(coefficient, horizon=math.inf)


def over_positions(
    measure: Callable[..., Tensor], heads: Sequence[Head], hidden: Tensor, mask: Tensor, *further: Tensor
) -> Tensor:
    """Measure every position from its hidden state, a few at a time; the backward pass measures them again.

    Args:
        measure: returns values (C,) of hidden states (C, D) and parts of `further`.
        heads: heads that `measure` uses; the first gets gradients.
        hidden: (N, T, D) with gradients.
        mask: (N, T) bool.
        further: (K, …), further values of the K positions in the mask.

    Returns:
        (N, T), 0 where `mask` is False.
    """
    mine = hidden[mask]  # (K, D)
    values: Tensor = _MeasuredAgain.apply(measure, heads, further, mine, *heads[0].linear.parameters())
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


class _MeasuredAgain(torch.autograd.Function):
    """Measures positions with whole heads, and again in the backward pass.

    After `torch.utils.checkpoint` the backward pass would run where ZeRO-3 has freed the weights again. All processes
    gather them as often, however many positions each has.
    """

    @staticmethod
    def forward(
        ctx: Any, measure: Callable[..., Tensor], heads: Sequence[Head], further: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return values (K,) from `inputs`: hidden states (K, D), then the head's weights."""
        kind = inputs[0].device.type
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.measure, ctx.heads, ctx.further = measure, heads, further
        ctx.save_for_backward(*inputs)
        with _whole(heads):
            parts = [measure(*part) for part in heads[0].split(inputs[0], *further)]
        return torch.cat(parts) if parts else inputs[0].new_zeros(0).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the hidden states and of the weights that train."""
        (hidden, *weights), head = ctx.saved_tensors, ctx.heads[0]
        trained = [number for number, weight in enumerate(weights) if weight.requires_grad]
        with _whole(ctx.heads), torch.enable_grad(), ctx.autocast():
            inner = [*head.linear.parameters()]
            for number in trained:
                inner[number].requires_grad_()  # tensors gathered by FSDP2 have no gradients
            sums = {number: torch.zeros_like(inner[number], dtype=torch.float32) for number in trained}
            of_hidden = [hidden[:0]]
            for states, part, *further in head.split(hidden, gradient, *ctx.further):
                states = states.detach().requires_grad_()
                values = ctx.measure(states, *further)
                d_states, *d_weights = torch.autograd.grad(values, [states, *map(inner.__getitem__, trained)], part)
                of_hidden.append(d_states)
                for number, d_weight in zip(trained, d_weights, strict=True):
                    sums[number] += d_weight
        summed = [sums[number].to(weight.dtype) if number in sums else None for number, weight in enumerate(weights)]
        return None, None, None, torch.cat(of_hidden), *map(_shard, summed, weights)


def _whole(heads: Sequence[Head]) -> ExitStack:
    """Return a block in which the heads' weights are gathered."""
    stack = ExitStack()
    for head in heads:
        stack.enter_context(head.whole())
    return stack


def _shard(gradient: Tensor | None, weight: Tensor) -> Tensor | None:
    """Average a gradient over the processes among which FSDP2 has divided its weight."""
    if gradient is None or not isinstance(weight, DTensor):
        return gradient
    mesh = weight.device_mesh
    return DTensor.from_local(gradient, mesh, [Partial("avg")] * mesh.ndim).redistribute(placements=weight.placements)


class FullKL:
    """Full KL between two models from their hidden states, a few positions at a time.

    Args:
        reference: reference model; None: the policy without its adapter, which must leave the head as it is.

    Raises:
        ConfigError: the adapter changes the head.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module | None, temperature: float) -> None:
        causal = causal_model(policy)
        if reference is None and isinstance(causal.get_output_embeddings(), AuxiliaryTrainingWrapper):
            raise ConfigError("kl_penalty is full, but an adapter trains the head: use low_var_kl, or leave it out.")
        self._policy, self._reference = causal, causal if reference is None else causal_model(reference)
        self._temperature = temperature

    def between(self, hidden: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """Return the divergence at every position (N, T), 0 where `mask` is False, with gradients of the policy.

        Args:
            hidden: (N, T, D), hidden states of the policy.
            reference: (N, T, D), hidden states of the reference model.
            mask: (N, T) bool.
        """
        heads = Head(self._policy), Head(self._reference)
        return over_positions(partial(self._kl_of_positions, *heads), heads, hidden, mask, reference[mask])

    def _kl_of_positions(self, policy: Head, reference: Head, hidden: Tensor, reference_hidden: Tensor) -> Tensor:
        logits = policy.logits(hidden).float() / self._temperature
        with torch.no_grad():
            theirs = reference.logits(reference_hidden.to(hidden.dtype)).float() / self._temperature
        return kl_penalty(logits.unsqueeze(0), theirs.unsqueeze(0), "full").squeeze(0)


def kl_penalty_reward(
    completions: list[Any], kl_penalty: list[float] | None = None, **columns: Any
) -> list[float | None]:
    """Return the KL penalty of each completion, None without a reference pass (in evaluation)."""
    return [None] * len(completions) if kl_penalty is None else list(kl_penalty)


PENALTY = kl_penalty_reward.__name__


class KLControl(SavedState):
    """KL penalty of a run, in its rewards or its loss, with a fixed or adaptive coefficient."""

    kind = "kl"

    def __init__(self, args: "DAPOConfig", accelerator: Accelerator, full: FullKL | None) -> None:
        self.args, self.accelerator, self.full = args, accelerator, full
        self.in_loss = args.has_kl_loss
        self.is_adaptive = args.kl_coef > 0 and args.kl_type == "adaptive"
        horizon = args.kl_horizon if self.is_adaptive else math.inf
        self.controller = AdaptiveKLController(args.kl_coef, args.kl_target, horizon)
        self._totals, self._completions = Totals(), 0  # both count from the last update

    @torch.no_grad()
    def penalise(self, rollout: "Rollout") -> dict[str, list[float]]:
        """Return the column that `kl_penalty_reward` reads, or {} without a penalty.

        Args:
            rollout: rollout scored by policy and reference; its `kl_penalty` is set.
        """
        policy, reference = rollout.scores, rollout.reference
        if not self.args.penalises_kl or policy is None or reference is None:
            return {}
        kl = self._kl(policy, reference.logps if self.full is None else reference.hidden, policy.mask)  # (N, T)
        self._count(kl, policy.mask)
        rollout.kl_penalty = -self.controller.coefficient * kl
        return {"kl_penalty": rollout.kl_penalty.sum(dim=1).tolist()}

    def drop_unscored_penalties(self, rewards: Tensor) -> Tensor:
        """Drop the KL penalty of completions without another reward.

        Args:
            rewards: (N of all processes, F); the last column is the penalty, if the run has one.
        """
        if self.args.penalises_kl:
            rewards = rewards.clone()
            rewards[rewards[:, :-1].isnan().all(dim=1), -1] = torch.nan
        return rewards

    def keep_reference(self, rollout: "Rollout") -> None:
        """Add the reference's hidden states to the rollout's batch, if a full KL in the loss needs them."""
        if self.args.has_kl_loss and rollout.reference is not None and rollout.reference.hidden is not None:
            hidden = rollout.reference.hidden.transpose(1, 2).contiguous()  # (N, D, T)
            rollout.batch = rollout.batch.with_columns(reference_hidden=hidden)

    def term(self, inputs: TermInputs, reference_hidden: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Return the KL loss of every token of a micro-batch (N, T), 0 outside its mask, and metrics.

        Args:
            inputs: the micro-batch, whose training pass has run.
            reference_hidden: (N, D, T), hidden states of the reference; None unless the KL is full.
        """
        mask, theirs = inputs.loss_mask, inputs.reference_logps
        if reference_hidden is not None:
            theirs = reference_hidden.transpose(1, 2)
        kl = self._kl(inputs, theirs, mask)
        self._count(kl.detach(), mask)
        return self.controller.coefficient * kl, self.update() if self.accelerator.sync_gradients else {}

    def _kl(self, policy: Scores | TermInputs, theirs: Tensor | None, mask: Tensor) -> Tensor:
        """Return the KL of the policy's tokens, (N, T), 0 outside the mask.

        Args:
            policy: scores of the policy with log-probabilities, or with hidden states for the full KL.
            theirs: log-probabilities of the reference, or its hidden states for the full KL.
            mask: (N, T) bool.
        """
        assert theirs is not None
        if self.full is not None:
            return self.full.between(cast("Tensor", policy.hidden), theirs, mask)
        return kl_penalty(policy.logps.masked_fill(~mask, 0), theirs.masked_fill(~mask, 0), self.args.kl_penalty)

    def _count(self, kl: Tensor, mask: Tensor) -> None:
        self._totals.add_mean("kl/mean", kl, mask)
        self._totals.add_largest("kl/max", kl, mask)
        self._totals.add_mean("kl/completion", kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1), mask.any(dim=1))
        self._completions += len(kl) * self.accelerator.num_processes

    def update(self) -> dict[str, float]:
        """Update the coefficient by the completions since the last update; return their metrics."""
        metrics = {"kl/coefficient": self.controller.coefficient} | self._totals.metrics(self.accelerator.gather)
        mean = metrics.get("kl/completion", math.nan)
        if not math.isnan(mean):
            self.controller.update(mean, self._completions)
        self._totals, self._completions = Totals(), 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient, which an adaptive control saves in checkpoints."""
        return self.controller.state_dict()

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Continue with the coefficient of a checkpoint."""
        self.controller.load_state_dict(states[0])
