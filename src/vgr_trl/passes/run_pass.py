"""Run the forward passes of a run, each for a stated purpose and over one row: `run_pass`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator, DistributedType
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.batch import Batch, make_completions_causal, per_token
from vgr_trl.errors import NotFiniteError
from vgr_trl.pixels import drop_empty_images, has_images
from vgr_trl.run import Features, Run
from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.model_support import (
    UnsupportedModel,
    base_of,
    causal_model,
    ignore_empty_images,
    replace_hidden_states,
)
from vgr_trl.sharing.prefix_split import check_inputs, find_split, is_image_token, round_up_to_groups
from vgr_trl.sharing.row import PackedRow, lay_out, run_row
from vgr_trl.signals.scoring import (
    Purpose,
    Scores,
    Want,
    cut_rows,
    head_with_average_gradient,
    read_hidden_states,
    score_in_chunks,
)


def has_whole_weights(accelerator: Accelerator) -> bool:
    """Whether each process has all weights, and no engine such as DeepSpeed makes the step."""
    whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    return accelerator.distributed_type in whole


def adapter_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return autocast's type for adapters, or None without autocast, with sharded weights or DeepSpeed."""
    precision = accelerator.mixed_precision if has_whole_weights(accelerator) else "no"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


@contextmanager
def cast_adapters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast adapter weights once for this block; gradients flow to the weights.

    PEFT casts activations to float32 in front of float32 adapters, and autocast casts them and the weights back, in
    each of their layers, and again where a checkpoint recomputes them. The numbers are the same. Adapters with dropout,
    with a variant such as DoRA, or with weights of another type than float32 stay as they are.

    Args:
        model: transformers model, with or without adapters, also wrapped.
        dtype: type in which autocast computes (`adapter_dtype`); None: nothing is cast.
    """
    layers = [module for module in model.modules() if type(module) is Linear] if dtype is not None else []
    flags, casting = list[Any](), list[Any]()
    try:
        for layer in layers:
            names = [name for name in layer.active_adapters if name in layer.lora_A]
            pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in names]
            plain = all(isinstance(layer.lora_dropout[name], nn.Identity) for name in names) and not layer.lora_variant
            if not plain or any(linear.weight.dtype != torch.float32 for pair in pairs for linear in pair):
                continue
            flags.append((layer, layer.cast_input_dtype_enabled))
            layer.cast_input_dtype_enabled = False
            linear: Any
            for linear in (linear for pair in pairs for linear in pair):
                linear.forward = partial(functional.linear, weight=linear.weight.to(dtype), bias=linear.bias)
                casting.append(linear)
        yield
    finally:
        for layer, enabled in flags:
            layer.cast_input_dtype_enabled = enabled
        for linear in casting:
            del linear.forward


class Extent(NamedTuple):
    """Prompt and completion tokens of a row that run, no completion token of a skipped row, and its prompt's number."""

    prompt: int
    completion: int
    group: int


def pack_rows(count: int, load: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Cut rows, in order, into parts whose load is at most 1; a part has one row at least.

    Args:
        count: N.
        load: returns the load of a pass over some rows, a share of what the pass may compute.
    """
    parts: list[list[int]] = [[0]]
    for row in range(1, count):
        wider = [*parts[-1], row]
        if load(wider) > max(1, load(parts[-1])):
            parts.append([row])
        else:
            parts[-1] = wider
    return parts


def count_positions(extents: Sequence[Extent]) -> tuple[int, int]:
    """Count the positions of a pass over some rows: with each prompt once, and with a prompt per row."""
    running = [row for row in extents if row.completion]
    completions, prompts = sum(row.completion for row in running), {row.group: row.prompt for row in running}
    return sum(prompts.values()) + completions, sum(row.prompt for row in running) + completions


def find_loss_mask(features: Features, batch: Batch) -> Tensor:
    """Return the tokens of a training batch whose log-probabilities the loss reads, (N, T) bool."""
    valid = batch.valid
    credited = valid & per_token(cast("Tensor", batch.advantages)).ne(0)  # (N, T)
    if features.skip_zero_advantage_tokens.enabled:
        return credited
    return valid & credited.any(1, keepdim=True) if features.skip_zero_advantage.enabled else valid


def find_extents(features: Features, batch: Batch, groups: Sequence[int]) -> list[Extent]:
    """Return the `Extent` of each row of a training batch."""
    loss_mask, prompt_mask = find_loss_mask(features, batch), batch.prompt_mask
    if not features.share_training.enabled:  # TRL's pass computes padding, too
        return [Extent(prompt_mask.size(1), loss_mask.size(1), group) for group in groups]
    runs = loss_mask.any(1) | (not features.skip_zero_advantage.enabled)
    completions = last_column(loss_mask if features.skip_padding.enabled else batch.valid).clamp(min=1) * runs
    columns = torch.stack([prompt_mask.sum(1), completions], dim=1).tolist()  # the host waits once
    pairs = zip(columns, groups, strict=True)
    return [Extent(prompt, completion, group) for (prompt, completion), group in pairs]


def runs_images(features: Features, batch: Batch) -> bool:
    """Whether the images of a micro-batch run even if no row has loss."""
    return not features.skip_images.enabled and "pixel_values" in batch.images.tensors


def may_be_skipped(features: Features, batch: Batch) -> bool:
    """Whether a micro-batch need not run if no row has loss."""
    skips = features.skip_zero_advantage.enabled and features.skip_padding.enabled
    return skips and not runs_images(features, batch)


def find_lengths(run: Run, batch: Batch, loss_mask: Tensor, config: Any) -> list[int]:
    """Return how many columns of each row's completion run, (N,), 0 for skipped rows; one row always runs.

    Args:
        run: gives the features, and whether completions may have images, which tools return.
        batch: completions that are scored.
        loss_mask: (N, T) bool.
        config: configuration of the model, which names its image tokens.
    """
    features = run.features
    read = loss_mask if features.skip_padding.enabled else batch.completion_mask.bool()
    images = torch.zeros_like(read)
    if run.facts.has_tools and "pixel_values" in batch.images.tensors:
        images = is_image_token(batch.completion_ids, config)
        # Images of completions run whole, and sharing needs a token behind them.
        images = images | torch.nn.functional.pad(images[:, :-1], (1, 0))
    runs = loss_mask.any(1) | (not features.skip_zero_advantage.enabled)
    columns = last_column(read | images).clamp(min=1) * runs, last_column(images).clamp(min=1), batch.prompt_mask.sum(1)
    lengths: list[int]
    lengths, least, widths = torch.stack(columns).tolist()  # the host waits once
    counts = (batch.images.num_images or ()) if runs_images(features, batch) else ()
    needed = [row for row, count in enumerate(counts) if count] or [*range(len(lengths))]
    if not any(lengths[row] for row in needed):  # all parameters take part in a pass, and so do images if they must
        row = min(needed, key=widths.__getitem__)
        lengths[row] = least[row]
    return lengths


def last_column(read: Tensor) -> Tensor:
    """Return the number of columns up to each row's last token to read, (N,), from (N, T) bool."""
    return (read * torch.arange(1, read.size(1) + 1, device=read.device)).amax(1)


def find_text(batch: Batch, config: Any) -> Batch | None:
    """Cut three text tokens from a row, two of its prompt and one of its completion; return None without any.

    A micro-batch without loss runs it where all parameters have to take part.

    Args:
        batch: completions that are scored.
        config: configuration of the model, which names its image tokens.
    """
    ends = torch.cat([batch.prompt_ids[:, -2:], batch.completion_ids[:, :1]], dim=1)
    images = is_image_token(ends, config).any(1).tolist()
    if all(images) or batch.width < 2:
        return None
    return batch.tokens.take([images.index(False)]).trim(2, 1)


def score(
    run: Run,
    batch: Batch,
    want: Want,
    model: nn.Module | None = None,
    *,
    purpose: Purpose = Purpose.ROLLOUT,
) -> Scores:
    """Score completions in chunks, without gradients.

    Args:
        run: gives the policy, processes and plans.
        batch: completions, on any device.
        want: quantities to return beside log-probabilities.
        model: another model to score with, which TRL's scoring can call; None: the policy.
        purpose: purpose of the pass.

    Raises:
        NotFiniteError: log-probabilities are NaN.
    """
    moved, model = batch.to_score.map(run.to_device), run.model if model is None else model
    scores = run_pass(run, model, moved, want, purpose=purpose, gradients=False)
    refuse_nan(scores.logps, scores.mask, run.step)
    return scores


def run_pass(run: Run, model: nn.Module, batch: Batch, want: Want, *, purpose: Purpose, gradients: bool) -> Scores:
    """Run a model over completions, and return the wanted quantities.

    Passes without gradients run in chunks of rows, except for the loss of an evaluation. With `want.tokens`, only the
    rows and columns of these tokens run. Passes of the policy in evaluation mode are not counted and not timed.

    Args:
        run: gives the policy, processes and plans.
        model: the policy, its reference or a critic, also wrapped.
        batch: completions.
        want: quantities to return, and tokens that are read.
        purpose: purpose of the pass.
        gradients: whether a backward pass follows.
    """
    batch = make_completions_causal(batch, causal_model(model).config)
    checkpointing: Any = run.args.gradient_checkpointing_kwargs
    if want.tokens is not None and _can_skip_pass(run, batch, want, want.tokens):
        anchor = torch.zeros(want.tokens.shape, device=want.tokens.device, requires_grad=True)
        return Scores(0 * anchor, want.tokens, torch.zeros_like(anchor) if want.entropies else None, rows_run=0)
    is_whole = gradients or purpose is Purpose.EVALUATION or want.tokens is not None
    chunks = [range(len(batch))] if is_whole else _cut_chunks(run, batch)
    averages = run.accelerator.is_fsdp2 and gradients
    uneven = run.all_agree if run.facts.is_sharded and run.dummy_image is None else None
    stage = "training" if gradients else "scoring"
    has_rows = run.features.sharing[stage].enabled and not want.router_loss  # which reads whole rows
    with (
        torch.set_grad_enabled(gradients),
        run.clock.stage(purpose.value, run.trains and not gradients),
        nullcontext() if gradients else disable_gradient_checkpointing(run.model, checkpointing),
        run.vision_cache.around(model, counts=run.trains),
        head_with_average_gradient(causal_model(model)) if averages else nullcontext(),
        ignore_empty_images(model, agree=uneven) if uneven or not has_rows else nullcontext(),
        nullcontext() if run.dummy_image is None else run.dummy_image.around(model, False),
    ):
        scores = score_in_chunks(model, batch, want, partial(_compute, run, has_rows), chunks)
    return replace(scores, values=scores.logps) if purpose is Purpose.CRITIC else scores  # its head returns values


def _compute(run: Run, has_rows: bool, model: nn.Module, batch: Batch, want: Want) -> Scores:
    """Run one call of the model: over a row, or by TRL's method where there is none."""
    laid = _try_row(run, model, batch, want.tokens) if has_rows else None
    length = batch.length
    logps: Any
    if laid is None:
        reading: Any = read_hidden_states(model, length) if want.reads_states else nullcontext()
        with reading as read:
            outputs = run.plain_pass(model, batch, compute_entropy=want.entropies, compute_aux_loss=want.router_loss)
        logps, entropies, router_loss = outputs
        hidden = read[0] if read else None
        return Scores(logps, batch.valid, entropies, hidden, router_loss=router_loss, rows_run=len(batch))
    row, call = laid
    scored = batch.completion_mask.bool() if want.tokens is None else want.tokens  # (N, T)
    tokens = batch.completion_ids[scored].unsqueeze(0)  # (1, K)
    # Without loss the row may be the one of `find_text`, whose columns are others.
    places = row.predicting_places(length)[scored] if tokens.numel() else tokens.new_empty(0)
    states = list[Tensor]()

    def select_emitting(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return hidden[:, places]

    base = base_of(causal_model(model))
    if run.dummy_image is not None:
        run.dummy_image.stands_in = has_images(batch.images.tensors) and not has_images(call)
    # Labels of the next token: TRL's head projects these positions only, and keeps no logits.
    labels = {"labels": None, "shift_labels": tokens, "fused_lm_head": True}
    with replace_hidden_states(base, select_emitting), run.accelerator.autocast():
        outputs = run_row(model, base, row, call | labels)
    if run.trains:
        run.sharing.add(len(row.batch_rows), len(row.prompts))
    logps, entropies = (
        None if values is None else values.new_zeros(scored.shape).masked_scatter(scored.to(values.device), values)
        for values in (outputs.log_probs, outputs.entropy)
    )
    hidden = states[0][0, row.predicting_places(length).clamp(min=0)] if want.reads_states else None  # (N, T, D)
    mask = batch.valid if want.tokens is None else want.tokens
    return Scores(logps, mask, entropies if want.entropies else None, hidden, rows_run=len(row.batch_rows))


def _try_row(
    run: Run, model: nn.Module, batch: Batch, tokens: Tensor | None
) -> tuple[PackedRow, dict[str, Any]] | None:
    """Lay out a batch as a row, or return None where the model has none for it.

    Args:
        run: gives plans.
        model: the model that runs, also wrapped.
        batch: completions.
        tokens: (N, T) bool, tokens with loss; None: all tokens are scored, a tool's too.
    """
    base = base_of(causal_model(model))
    lengths = None
    if tokens is not None:
        is_empty = may_be_skipped(run.features, batch) and not tokens.any()
        text = find_text(batch, base.config) if is_empty else None
        batch = batch if text is None else text
        lengths = [1] if text is not None else find_lengths(run, batch, tokens, base.config)
    inputs = drop_empty_images(batch.model_inputs)
    try:
        check_inputs(inputs, base.config)
        split = find_split(inputs, base.config, batch.width - 1)
        return lay_out(base, inputs, split, lengths)
    except UnsupportedModel:
        if run.trains:
            run.sharing.add(len(batch), len(batch))
        return None


def _cut_chunks(run: Run, batch: Batch) -> list[range]:
    """Cut rows into scoring chunks, the same on every process."""
    args, most = run.args, run.args.max_tokens_per_micro_batch
    group = run.completions_per_prompt if run.features.share_scoring.enabled else 1
    rows = round_up_to_groups(run.rows_per_chunk if run.trains else args.per_device_eval_batch_size, group)
    if most is None:
        return cut_rows(len(batch), rows)
    columns = torch.tensor([batch.width + batch.length, batch.length], device=run.accelerator.device)
    longest, completion = run.accelerator.gather(columns).view(-1, 2).amax(0).tolist()
    return cut_rows(len(batch), min(rows, rows_within(most, group, longest, completion)), group)


def _can_skip_pass(run: Run, batch: Batch, want: Want, tokens: Tensor) -> bool:
    """Whether a micro-batch without loss can be skipped: all weights have gradients already.

    Where processes exchange gradients, parts of weights, or whether they have images, all have to run the model.
    """
    exchanges = run.accelerator.sync_gradients or run.dummy_image is not None
    alone = run.accelerator.num_processes == 1 or not exchanges
    skips = alone and has_whole_weights(run.accelerator) and may_be_skipped(run.features, batch)
    if not skips or bool(tokens.any()):
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
    # Any completion length will do: the forward pass is not hooked in `generate`.
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
