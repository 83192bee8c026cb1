"""Loss terms beside TRL's: KL divergences of all kinds, perception loss, entropy penalty.

Terms are per token, (N, T), and 0 on invalid tokens: the caller sums and divides them as it does its policy loss.
`DAPOTrainer` uses `KLControl` and `auxiliary_loss`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from accelerate import Accelerator
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from vgr_trl.checkpoints import SavedState
from vgr_trl.config import PER_WINDOW, KLKind, LossOptions
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.metrics.step_metrics import Totals
from vgr_trl.options import Checked, option
from vgr_trl.registries import call_plugin, declares, loss_terms
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.ratios import bounded, visual_dependency
from vgr_trl.signals.scoring import Head, rest_of

if TYPE_CHECKING:  # verl and EasyR1 read this file without TRL
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.rollout import Rollout

KINDS = get_args(KLKind)
_LARGEST = 10.0  # of `low_var_kl`
_LARGEST_DIFFERENCE = 20.0
_ROUNDING = 1e-6  # smaller differences have the sign of a float32 rounding error


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: str = "low_var_kl") -> Tensor:
    """Return an estimate of KL(policy ‖ reference) for every token, as EasyR1 and verl define its kinds.

    With d = log π − log π_ref of the sampled token, `kl` is d (k1), `abs` |d| with gradient 0 where |d| < 1e-6,
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
    difference = difference.clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
    return (torch.exp(-difference) + difference - 1).clamp(max=_LARGEST)


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


def perception_divergence(logps: Tensor, perturbed_logps: Tensor, mask: Tensor) -> Tensor:
    """Return, per token, the KL divergence between the policy given the image and given the perturbed image.

    It is the `visual_dependency` with gradients, which are 0 where the dependency is clamped (at 10, or at a difference
    of 20).

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; other values are ignored, NaN included.

    Returns:
        (N, T) float32 in [0, 10], 0 outside `mask`.
    """
    mask = mask.bool()
    return visual_dependency(logps.masked_fill(~mask, 0), perturbed_logps.masked_fill(~mask, 0))


def surprisal(logps: Tensor, mask: Tensor) -> Tensor:
    """Return -log p of every valid token, 0 elsewhere: of sampled tokens, an estimate of the policy's entropy.

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
    """
    return -logps.float().masked_fill(~mask.bool(), 0)


def perception_loss(
    logps: Tensor,
    perturbed_logps: Tensor,
    mask: Tensor,
    *,
    coefficient: float = 0.01,
    entropy_coefficient: float = 0.0,
    perturbed_entropy_coefficient: float = 0.0,
) -> Tensor:
    """Return the implicit perception loss and double entropy loss of PAPO (https://huggingface.co/papers/2507.06448).

    -gamma · KL(original, perturbed) - eta_1 · log p_original - eta_2 · log p_perturbed: minimising it makes the
    completion depend on the image. The entropy terms keep both distributions sharp; without them the policy can win by
    writing unrelated tokens. Gradients flow through both log-probabilities. In the published code the perturbed
    log-probabilities carry no gradient by default, so that its entropy term on them trains nothing.

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; other values are ignored, NaN included.
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


def entropy_penalty(logps: Tensor, mask: Tensor, coefficient: float = 0.06) -> Tensor:
    """Return the entropy penalty of VPPO per token, coefficient · -log p (https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
        coefficient: at least 0.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`; its mean over the valid tokens is the penalty.
    """
    return coefficient * surprisal(logps, mask)


def over_positions(
    measure: Callable[..., Tensor], heads: Sequence[Head], hidden: Tensor, mask: Tensor, *further: Tensor
) -> Tensor:
    """Measure every position from its hidden state, a few at a time; the backward pass measures them again.

    Args:
        measure: returns values (C,) of hidden states (C, D) and parts of `further`.
        heads: that `measure` uses; the first gets gradients.
        hidden: (N, T, D) with gradients.
        mask: (N, T) bool.
        further: (K, …), of the K positions in the mask.

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
        """Return values (K,) of hidden states (K, D), the first of `inputs`; the others are the head's weights."""
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
        trained = [number for number, each in enumerate(weights) if each.requires_grad]
        with _whole(ctx.heads), torch.enable_grad(), ctx.autocast():
            inner = [*head.linear.parameters()]
            for number in trained:
                inner[number].requires_grad_()  # those that FSDP2 has gathered
            sums = {number: torch.zeros_like(inner[number], dtype=torch.float32) for number in trained}
            of_hidden = [hidden[:0]]
            for states, part, *further in head.split(hidden, gradient, *ctx.further):
                states = states.detach().requires_grad_()
                values = ctx.measure(states, *further)
                found, *others = torch.autograd.grad(values, [states, *(inner[each] for each in trained)], part)
                of_hidden.append(found)
                for number, other in zip(trained, others, strict=True):
                    sums[number] += other
        of_weights = [sums[number].to(each.dtype) if number in sums else None for number, each in enumerate(weights)]
        return None, None, None, torch.cat(of_hidden), *map(_shard, of_weights, weights)


def _whole(heads: Sequence[Head]) -> ExitStack:
    """Return a block in which the weights of heads are whole."""
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
        reference: None: the policy without its adapter, which must leave the head as it is.

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
            reference: (N, T, D) of the reference model.
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
        self.is_adaptive = args.kl_coef > 0 and args.kl_type == "adaptive"
        self.controller: AdaptiveKLController = FixedKLController(args.kl_coef)
        if self.is_adaptive:
            self.controller = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        self._totals, self._completions = Totals(), 0  # since the last update

    @torch.no_grad()
    def penalise(self, rollout: "Rollout") -> dict[str, list[float]]:
        """Return the column that `kl_penalty_reward` reads, or {} without a penalty.

        Args:
            rollout: scored by the policy and its reference; its `kl_penalty` is set.
        """
        policy, reference = rollout.scores, rollout.reference
        if not self.args.penalises_kl or policy is None or reference is None:
            return {}
        kl = self._kl(policy, reference.logps if self.full is None else reference.hidden, policy.mask)  # (N, T)
        self._count(kl, policy.mask)
        rollout.kl_penalty = -self.controller.coefficient * kl
        return {"kl_penalty": rollout.kl_penalty.sum(dim=1).tolist()}

    def drop_unscored_penalties(self, rewards: Tensor) -> Tensor:
        """Drop the penalty of completions that no other reward applies to.

        Args:
            rewards: (N of all, F); the last column is the penalty, if the run has one.
        """
        if self.args.penalises_kl:
            rewards = rewards.clone()
            rewards[rewards[:, :-1].isnan().all(dim=1), -1] = torch.nan
        return rewards

    def keep_reference(self, rollout: "Rollout") -> None:
        """Add the reference's hidden states to the batch of a scored rollout, if the full KL in the loss needs them."""
        if self.args.has_kl_loss and rollout.reference is not None and rollout.reference.hidden is not None:
            hidden = rollout.reference.hidden.transpose(1, 2).contiguous()  # (N, D, T)
            rollout.batch = {**rollout.batch, "reference_hidden": hidden}

    def term(self, passed: "TermInputs") -> tuple[Tensor, dict[str, float]]:
        """Return the KL loss of every token of a micro-batch (N, T), 0 outside its mask, and metrics."""
        coefficient, batch = self.controller.coefficient, passed.batch
        theirs = batch["ref_per_token_logps"] if self.full is None else batch["reference_hidden"].transpose(1, 2)
        kl = self._kl(passed, theirs, passed.mask)
        self._count(kl.detach(), passed.mask)
        return coefficient * kl, self.update() if self.accelerator.sync_gradients else {}

    def _kl(self, policy: Any, theirs: Any, mask: Tensor) -> Tensor:
        """Return the KL of every token (N, T), 0 outside `mask`.

        Args:
            policy: scores of the policy, `logps` or for the full KL `hidden`.
            theirs: log-probabilities of the reference, for the full KL its hidden states.
            mask: (N, T) bool.
        """
        if self.full is not None:
            return self.full.between(policy.hidden, theirs, mask)
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


_PER_COMPLETION = ("grpo", "sapo")


def average_as_loss(
    per_token: Tensor, mask: Tensor, inputs: Mapping[str, Any], args: "DAPOConfig", steps: int, num_processes: int
) -> Tensor:
    """Average a loss term as TRL 1.16 averages its own loss.

    TRL does not return its normaliser, which is local to `_compute_loss`; tests/training/test_loss_terms.py compares.

    Args:
        per_token: (N, T) values of the term.
        mask: (N, T) tokens that count in the loss.
        inputs: the micro-batch, with `num_items_in_batch`, the valid tokens of the rollout over all processes.
        args: options of the run.
        steps: micro-batches of the current optimizer step.
        num_processes: number of processes.
    """
    sums, counts = (per_token * mask).sum(-1), mask.sum(-1)  # (N,)
    if args.loss_type in PER_WINDOW:
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / num_processes
        of_window: Tensor = tokens * steps / args.steps_per_generation
        return sums.sum() / of_window
    if args.loss_type in _PER_COMPLETION:
        average = (sums / counts.clamp(min=1.0)).mean()
    elif args.loss_type == "bnpo":
        average = sums.sum() / counts.sum().clamp(min=1.0)
    elif args.loss_type == "dr_grpo":
        average = sums.sum() / (per_token.size(0) * int(args.max_completion_length or 1))
    else:  # luspo
        average = sums.mean()
    return average / steps


@dataclass(frozen=True)
class TermInputs:
    """Inputs of a loss term: a micro-batch of N completions whose training pass has run.

    Attributes:
        logps: (N, T) with gradients, log-probabilities of the tokens; constants outside `mask`.
        mask: (N, T) bool, tokens that count in the loss.
        batch: the micro-batch of TRL; for terms that need `teacher` with `teacher_logps` (N, T), of the tokens under
            `teacher_view`, NaN for rows without it; for `teacher_top` also with `teacher_top_logps` (N, K + 1, T)
            and `teacher_top_ids` (N, K, T), the teacher's most probable tokens, and last all others together.
        perturbed_logps: (N, T) with gradients, given the perturbed image; of terms that need `perturbed`.
        hidden: (N, T, D) with gradients, hidden states of the positions that emit the tokens, for terms that need
            `hidden`.
        model: the policy, also wrapped; None inside verl and EasyR1.
        temperature: that logits are divided by.
        totals: collects metrics.
        scores: `Scores` of the pass: the tokens with loss, and the values of a critic's head; None inside verl and
            EasyR1.
    """

    logps: Tensor
    mask: Tensor
    batch: Mapping[str, Any] = field(default_factory=dict)
    perturbed_logps: Tensor | None = None
    hidden: Tensor | None = None
    model: nn.Module | None = None
    temperature: float = 1.0
    totals: Totals = field(default_factory=Totals)
    scores: Any = None

    def log(self, name: str, values: Tensor) -> None:
        """Log the mean of values (N, T) over the tokens that count."""
        self.totals.add_mean(name, values.detach(), self.mask)


@dataclass
class LossPass:
    """A micro-batch while TRL computes its loss, and the training pass over it once it has run."""

    batch: Mapping[str, Any]
    passed: TermInputs | None = None


@loss_terms.register("entropy_penalty")
def entropy_penalty_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return VPPO's entropy penalty of every token (N, T)."""
    term = entropy_penalty(passed.logps, passed.mask, options.entropy_penalty_coef)
    passed.log("entropy_penalty", term)
    return term


@loss_terms.register("perception_loss")
@declares(needs=("perturbed",))
def perception_loss_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return PAPO's perception loss of every token (N, T), with both entropy terms."""
    perturbed = cast("Tensor", passed.perturbed_logps)
    passed.log("perception_loss", -perception_divergence(passed.logps.detach(), perturbed.detach(), passed.mask))
    return perception_loss(
        passed.logps,
        perturbed,
        passed.mask,
        coefficient=options.perception_loss_weight,
        entropy_coefficient=options.der_loss_weight1,
        perturbed_entropy_coefficient=options.der_loss_weight2,
    )


@loss_terms.register("entropy_loss")
def entropy_loss_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return PAPO's entropy term on the original image, for every token (N, T), where no other term of it is on."""
    return options.der_loss_weight1 * surprisal(passed.logps, passed.mask)


DivergenceKind = Literal["jensen_shannon", "forward", "reverse"]


def teacher_divergence(logits: Tensor, ids: Tensor, teacher: Tensor, kind: str = "jensen_shannon") -> Tensor:
    """Return the divergence of the policy's distribution from a teacher's over K tokens, and all others as one.

    `forward` is KL(teacher ‖ policy), `reverse` KL(policy ‖ teacher), `jensen_shannon` the mean of both KLs to the
    mixture of teacher and policy, one half each (Vision-OPD, https://huggingface.co/papers/2605.18740).

    Args:
        logits: (…, vocabulary) of the policy, divided by the temperature.
        ids: (…, K), tokens of the teacher.
        teacher: (…, K + 1), their log-probabilities and last that of all others together; (…, K) if there are none.
        kind: `jensen_shannon`, `forward` or `reverse`.

    Returns:
        (…), in nats, with gradients of the policy.
    """
    logps, teacher = bounded(logits.log_softmax(-1)), bounded(teacher)
    policy = logps.gather(-1, ids.long())
    if teacher.size(-1) > ids.size(-1):
        policy = torch.cat([policy, rest_of(logps, ids)], -1)
    if kind == "forward":
        return (teacher.exp() * (teacher - policy)).sum(-1)
    if kind == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1)
    mixture = torch.logaddexp(policy, teacher) - math.log(2)
    return ((teacher.exp() * (teacher - mixture) + policy.exp() * (policy - mixture)) / 2).sum(-1)


def gated_distillation(logps: Tensor, teacher_logps: Tensor, beta: float = 5.0) -> Tensor:
    """Return SDAR's gated distillation of sampled tokens, gate · (log π_teacher − log π).

    The gate is sigmoid(beta · (log π_teacher − log π)), without a gradient, so that tokens that the teacher finds
    likelier become likelier. Source: https://huggingface.co/papers/2605.15155 and its code.

    Args:
        logps: (N, T) with gradients, log-probabilities of the sampled tokens.
        teacher_logps: (N, T), of the same tokens.
        beta: steepness of the gate, at least 0; 0: all tokens count by one half.
    """
    gap = teacher_logps - logps
    return (beta * gap.detach()).sigmoid() * gap


@dataclass
class TeacherDivergenceOptions(Checked):
    """Numbers of the loss term `teacher_divergence`."""

    teacher_divergence_coef: float = option(1.0, "Weight of the divergence from the teacher.", ge=0)
    teacher_divergence_kind: DivergenceKind = option("jensen_shannon", "Divergence from the teacher.")


@loss_terms.register("teacher_divergence")
@declares(needs=("hidden", "teacher_top"), options=TeacherDivergenceOptions)
def teacher_divergence_term(passed: TermInputs, options: TeacherDivergenceOptions) -> Tensor:
    """Return the weighted divergence of every token (N, T) from its teacher; 0 for rows without the view."""
    known = passed.mask & ~passed.batch["teacher_logps"].isnan()
    teacher, ids = (passed.batch[f"teacher_top_{name}"].transpose(1, 2)[known] for name in ("logps", "ids"))
    head = Head(causal_model(cast("nn.Module", passed.model)))

    def measure(hidden: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
        logits = head.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / passed.temperature
        return teacher_divergence(logits, ids, teacher.to(logits), options.teacher_divergence_kind)

    divergence = over_positions(measure, [head], cast("Tensor", passed.hidden), known, ids, teacher)
    passed.log("teacher_divergence", divergence)
    return options.teacher_divergence_coef * divergence


@dataclass
class GatedDistillationOptions(Checked):
    """Numbers of the loss term `gated_distillation`."""

    gated_distillation_coef: float = option(0.01, "Weight of SDAR's gated distillation.", ge=0)
    gate_beta: float = option(5.0, "Steepness of SDAR's gate, per nat; 0: one half for all tokens.", ge=0)


@loss_terms.register("gated_distillation")
@declares(needs=("teacher",), options=GatedDistillationOptions)
def gated_distillation_term(passed: TermInputs, options: GatedDistillationOptions) -> Tensor:
    """Return SDAR's weighted loss of every token (N, T); 0 for rows without the view."""
    teacher = passed.batch["teacher_logps"]
    unknown, beta = teacher.isnan() | ~passed.mask, options.gate_beta
    logps, teacher = passed.logps.masked_fill(unknown, 0), teacher.masked_fill(unknown, 0)
    loss = gated_distillation(logps, teacher, beta)
    passed.log("gated_distillation", loss)
    passed.log("teacher_gate", (beta * (teacher - logps)).sigmoid())
    return options.gated_distillation_coef * loss


def auxiliary_loss(
    passed: TermInputs, terms: Mapping[str, Any], kl: KLControl, steps: int
) -> tuple[Tensor | float, dict[str, float]]:
    """Return the terms of a micro-batch beside TRL's loss, averaged as TRL averages it, and metrics.

    Args:
        passed: the micro-batch, whose training pass has run.
        terms: name of a loss term that is on -> its function.
        kl: the KL to the reference.
        steps: micro-batches of the current optimizer step.
    """
    args, accelerator, metrics = kl.args, kl.accelerator, dict[str, float]()
    values = [_compute_term(name, term, passed, args) for name, term in terms.items()]  # (N, T) each
    if args.has_kl_loss:
        term, metrics = kl.term(passed)
        values.append(term)
    if not values:
        return 0.0, metrics
    total = torch.stack(values).sum(dim=0)  # (N, T)
    average = average_as_loss(total, passed.mask, passed.batch, args, steps, accelerator.num_processes)
    return average, metrics | passed.totals.metrics(accelerator.gather)


def _compute_term(name: str, function: Any, given: TermInputs, args: LossOptions) -> Tensor:
    """Return a loss term (N, T), 0 outside the mask; raise `DataError` if it is no such tensor or has no gradient."""
    term = call_plugin(f"the loss term {name}", function, given, args.plugin_values(function))
    if not isinstance(term, Tensor) or term.shape != given.mask.shape:
        found = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
        raise DataError(f"The loss term {name} returned {found}: return a tensor {tuple(given.mask.shape)}.")
    term = term.masked_fill(~given.mask, 0)
    if given.logps.requires_grad and not term.requires_grad and term.any():
        raise DataError(f"The loss term {name} has no gradient, so it trains nothing: compute it from passed.logps.")
    return term
