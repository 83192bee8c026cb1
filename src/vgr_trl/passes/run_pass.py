"""Run the forward passes of a run, each for a stated purpose and over one row: `run_pass`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.errors import NotFiniteError
from vgr_trl.passes.adapters import has_whole_weights
from vgr_trl.passes.loss_mask import Skipping, find_text
from vgr_trl.patches.trl import make_completions_causal
from vgr_trl.run import Run
from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.model_support import UnsupportedModel, base_of, causal_model, replace_hidden_states
from vgr_trl.sharing.prefix_split import check_inputs, find_split, round_up_to_groups
from vgr_trl.sharing.row import Row, lay_out
from vgr_trl.sharing.shared_forward import (
    drop_empty_images,
    has_images,
    ignore_empty_images,
    run_row,
)
from vgr_trl.signals.scoring import (
    Computed,
    Purpose,
    Scores,
    Want,
    head_with_average_gradient,
    read_hidden_states,
)
from vgr_trl.signals.scoring import score as score_in_chunks


def score(
    run: Run,
    batch: Mapping[str, Any],
    want: Want,
    model: nn.Module | None = None,
    *,
    purpose: Purpose = Purpose.ROLLOUT,
) -> Scores:
    """Score completions in chunks, without gradients.

    Args:
        run: gives the policy, processes and plans.
        batch: as `scoring_inputs` returns it.
        want: quantities to return beside log-probabilities.
        model: another model to score with, which TRL's scoring can call; None: the policy.
        purpose: purpose of the pass.

    Raises:
        NotFiniteError: log-probabilities are NaN.
    """
    inputs = run.to_device({name: value for name, value in batch.items() if value is not None})
    scores = run_pass(run, run.model if model is None else model, inputs, want, purpose=purpose, gradients=False)
    refuse_nan(scores.logps, scores.mask, run.step)
    return scores


def run_pass(
    run: Run, model: nn.Module, batch: Mapping[str, Any], want: Want, *, purpose: Purpose, gradients: bool
) -> Scores:
    """Run a model over completions, and return the wanted quantities.

    Passes without gradients run in chunks of rows, except for the loss of an evaluation. With `want.tokens`, only the
    rows and columns of these tokens run. Passes of the policy in evaluation mode are not counted and not timed.

    Args:
        run: gives the policy, processes and plans.
        model: the policy, its reference or a critic, also wrapped.
        batch: arguments of TRL's scoring, but for the model, (N, P + T). With tools `tool_mask` (N, T).
        want: quantities to return, and tokens that are read.
        purpose: purpose of the pass.
        gradients: whether a backward pass follows.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    inputs = make_completions_causal(given, causal_model(model).config, given["logits_to_keep"])
    checkpointing: Any = run.args.gradient_checkpointing_kwargs
    if want.tokens is not None and _can_skip_pass(run, inputs, want, want.tokens):
        anchor = torch.zeros(want.tokens.shape, device=want.tokens.device, requires_grad=True)
        return Scores(0 * anchor, want.tokens, torch.zeros_like(anchor) if want.entropies else None, rows_run=0)
    is_whole = gradients or purpose is Purpose.EVALUATION or want.tokens is not None
    rows = None if is_whole else _rows_of_chunk(run, inputs)
    averages = run.accelerator.is_fsdp2 and gradients
    uneven = run.all_agree if run.facts.is_sharded and run.dummy_image is None else None
    has_rows = run.features.sharing["training" if gradients else "scoring"].enabled
    with (
        torch.set_grad_enabled(gradients),
        run.clock.stage(purpose.value, run.trains and not gradients),
        nullcontext() if gradients else disable_gradient_checkpointing(run.model, checkpointing),
        run.vision_cache.around(model, counts=run.trains),
        head_with_average_gradient(causal_model(model)) if averages else nullcontext(),
        ignore_empty_images(model, agree=uneven) if uneven or not has_rows else nullcontext(),
        nullcontext() if run.dummy_image is None else run.dummy_image.around(model, False),
    ):
        scores = score_in_chunks(model, inputs, want, compute=partial(_compute, run), rows_per_pass=rows)
    return replace(scores, values=scores.logps) if purpose is Purpose.CRITIC else scores  # its head gives values


def _compute(run: Run, model: nn.Module, inputs: dict[str, Any], want: Want) -> Computed:
    """Run one call of the model: over a row, or by TRL's method where there is none."""
    laid, length = _lay_out(run, model, inputs, want.tokens), inputs["logits_to_keep"]
    if laid is None:
        reading: Any = read_hidden_states(model, length) if want.reads_states else nullcontext()
        with reading as read:
            outputs = run.plain_pass(model, **inputs, compute_entropy=want.entropies, compute_aux_loss=want.router_loss)
        return Computed(*outputs, read[0] if read else None, None, len(inputs["input_ids"]))
    row, call = laid
    scored = inputs["attention_mask"][:, -length:].bool() if want.tokens is None else want.tokens  # (N, T)
    tokens = inputs["input_ids"][:, -length:][scored].unsqueeze(0)  # (1, K)
    places = row.reads(length)[scored] if tokens.numel() else tokens[0]  # without loss the row may be another one
    states = list[Tensor]()

    def select_emitting(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return hidden[:, places]

    base = base_of(causal_model(model))
    if run.dummy_image is not None:
        run.dummy_image.stands_in = has_images(inputs) and not has_images(call)
    # Labels of the next token: TRL's head projects these positions only, and keeps no logits.
    labels = {"labels": None, "shift_labels": tokens, "fused_lm_head": True}
    with replace_hidden_states(base, select_emitting), run.accelerator.autocast():
        outputs = run_row(model, base, row, call | labels)
    if run.trains:
        run.sharing.add(len(row.rows), len(row.prompts))
    logps: Any
    logps, entropies = (
        None if values is None else values.new_zeros(scored.shape).masked_scatter(scored.to(values.device), values)
        for values in (outputs.log_probs, outputs.entropy)
    )
    hidden = states[0][0, row.reads(length).clamp(min=0)] if want.reads_states else None  # (N, T, D)
    return Computed(logps, entropies if want.entropies else None, None, hidden, want.tokens, len(row.rows))


def _lay_out(
    run: Run, model: nn.Module, inputs: Mapping[str, Any], tokens: Tensor | None
) -> tuple[Row, dict[str, Any]] | None:
    """Lay out a batch as a row, or return None where the model or the mode has none.

    Args:
        run: gives plans.
        model: the model that runs, also wrapped.
        inputs: arguments of TRL's scoring, but for the model.
        tokens: (N, T) bool, tokens with loss; None: all valid tokens are scored.
    """
    base, stage = base_of(causal_model(model)), "training" if torch.is_grad_enabled() else "scoring"
    if run.features.sharing[stage].reason is not None:
        return None
    lengths, skipping = None, Skipping(run.features, run.facts.has_tools)
    if tokens is not None:
        is_empty = skipping.rows and skipping.padding and not skipping.runs_images(inputs) and not tokens.any()
        text = find_text(inputs, base.config) if is_empty else None
        inputs = inputs if text is None else text
        lengths = [1] if text is not None else skipping.lengths(inputs, tokens, base.config)
    names = inputs.keys() - {"logits_to_keep", "num_images", "num_tiles"}
    given = drop_empty_images({name: inputs[name] for name in names})
    try:
        check_inputs(given, base.config)
        split = find_split(given, base.config, inputs["input_ids"].size(1) - 1 - inputs["logits_to_keep"])
        return lay_out(base, given, split, lengths)
    except UnsupportedModel:
        if run.trains:
            run.sharing.add(len(inputs["input_ids"]), len(inputs["input_ids"]))
        return None


def _rows_of_chunk(run: Run, inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a scoring chunk, the same on every process."""
    args, most = run.args, run.args.max_tokens_per_micro_batch
    group = run.completions_per_prompt if run.features.share_scoring.enabled else 1
    rows = round_up_to_groups(run.rows_per_chunk if run.trains else args.per_device_eval_batch_size, group)
    if most is None:
        return rows
    columns = torch.tensor([inputs["input_ids"].size(1), inputs["logits_to_keep"]], device=run.accelerator.device)
    longest, completion = run.accelerator.gather(columns).view(-1, 2).amax(0).tolist()
    return min(rows, rows_within(most, group, longest, completion))


def _can_skip_pass(run: Run, inputs: Mapping[str, Any], want: Want, tokens: Tensor) -> bool:
    """Whether a micro-batch without loss can be skipped: all weights have gradients already.

    Where processes exchange gradients, parts of weights, or whether they have images, all have to run the model.
    """
    skipping = Skipping(run.features, run.facts.has_tools)
    exchanges = run.accelerator.sync_gradients or run.dummy_image is not None
    alone = run.accelerator.num_processes == 1 or not exchanges
    skips = skipping.rows and skipping.padding and not skipping.runs_images(inputs)
    if not (alone and has_whole_weights(run.accelerator) and skips) or want.reads_states or bool(tokens.any()):
        return False
    return all(weight.grad is not None for weight in run.model.parameters() if weight.requires_grad)


@contextmanager
def around_generation(run: Run, model: nn.Module) -> Iterator[None]:
    """Share prompts in generations of this block, with cached image features.

    Args:
        run: gives processes and plans; metrics leave out the rows of an evaluation.
        model: the model that generates, also wrapped.
    """
    shares = run.features.share_generation.enabled
    evens = {"evens_images": run.dummy_image is not None}
    modes: Any = {"agree": run.all_agree, **evens} if run.facts.is_sharded else {}
    sharing: Any = share_prompts(model, 1, warns=False, **modes) if shares else ignore_empty_images(model)
    with (
        run.vision_cache.around(model, counts=run.trains),
        sharing as report,
        nullcontext() if run.dummy_image is None else run.dummy_image.around(model, True),
    ):
        yield
    if shares and run.trains:
        run.sharing.add(report.rows, report.prompts)


def rows_within(most_tokens: int, group: int, longest: int, completion: int) -> int:
    """Return the number of rows that fit into a budget of tokens, at least one.

    Args:
        most_tokens: `max_tokens_per_micro_batch`.
        group: G where prompts are shared, so that whole groups pass if one fits; 1 where they are not.
        longest: P + T.
        completion: T.
    """
    if (groups := most_tokens // (longest + (group - 1) * completion)) > 0:
        return groups * group
    return max((most_tokens - longest) // completion + 1, 1)


def refuse_nan(logps: Tensor, mask: Tensor, step: int) -> None:
    """Raise `NotFiniteError` if log-probabilities (N, T) are NaN, which signals would read as rows without images.

    Args:
        logps: log-probabilities of a scoring pass.
        mask: (N, T) bool, tokens that count.
        step: optimizer steps so far.
    """
    if count := int((logps.isnan() & mask).any(dim=1).sum()):
        raise NotFiniteError(
            f"The model's log-probabilities of {count} of {len(mask)} completions are NaN at step {step + 1}: its "
            "weights are broken, or what it computes overflows, so look at the newest checkpoint, or use bfloat16 "
            "instead of float16."
        )
