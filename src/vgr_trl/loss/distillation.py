"""Loss terms that learn from a teacher: divergence over its likeliest tokens, and gated distillation."""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vgr_trl.loss.kl import over_positions
from vgr_trl.loss.terms import TermInputs
from vgr_trl.options import Checked, option
from vgr_trl.registries import declares, loss_terms
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.ratios import bounded
from vgr_trl.signals.scoring import Head, rest_of

DivergenceKind = Literal["jensen_shannon", "forward", "reverse"]


def teacher_divergence(logits: Tensor, ids: Tensor, teacher: Tensor, kind: str = "jensen_shannon") -> Tensor:
    """Return the divergence of the policy's distribution from a teacher's over K tokens, the rest pooled.

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
    teacher_logps = cast("Tensor", passed.teacher_logps)
    ids, teacher = cast("tuple[Tensor, Tensor]", passed.teacher_top)
    known = passed.loss_mask & ~teacher_logps.isnan()
    head = Head(causal_model(cast("nn.Module", passed.model)))

    def measure(hidden: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
        logits = head.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / passed.temperature
        return teacher_divergence(logits, ids, teacher.to(logits), options.teacher_divergence_kind)

    divergence = over_positions(measure, [head], cast("Tensor", passed.hidden), known, ids[known], teacher[known])
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
    teacher = cast("Tensor", passed.teacher_logps)
    unknown, beta = teacher.isnan() | ~passed.loss_mask, options.gate_beta
    logps, teacher = passed.logps.masked_fill(unknown, 0), teacher.masked_fill(unknown, 0)
    loss = gated_distillation(logps, teacher, beta)
    passed.log("gated_distillation", loss)
    passed.log("teacher_gate", (beta * (teacher - logps)).sigmoid())
    return options.gated_distillation_coef * loss
