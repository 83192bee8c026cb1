"""Training passes over what the loss reads, and over nothing else."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn

from vgr_trl.errors import DataError
from vgr_trl.passes.loss_mask import (
    Extent,
    Window,
    extents_of,
    find_loss_mask,
    find_text,
    find_window,
    group_by_length,
    scatter_back,
    score_only_tokens,
    trim_inputs,
)
from vgr_trl.rollout import ConstructedTrainer, TrainingPass
from vgr_trl.rows import OLD_LOGPS
from vgr_trl.scoring_inputs import valid_tokens
from vgr_trl.sharing.empty_images import has_images
from vgr_trl.sharing.lending import (
    PROMPT_GROUP,
    READ_AGAIN,
    find_read_again,
    is_last_micro_batch,
    shuffle_whole_groups,
    sort_by_group,
)
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.sharing.prefix_split import is_image_token
from vgr_trl.signals.head import read_hidden_states

Scored = tuple[torch.Tensor, torch.Tensor | None, Any]  # log-probabilities, entropies (N, T), loss of the router
Score = Callable[..., Scored]  # TRL's `_get_per_token_logps_and_entropies`


def training_pass(
    trainer: ConstructedTrainer,
    model: nn.Module,
    plain: Score,
    inputs: dict[str, Any],
    batch_size: int | None,
    passed: TrainingPass | None,
) -> Scored:
    """Return what a pass with gradients gives for the tokens of a micro-batch with loss, and constants for the others.

    Those are the old log-probabilities, or 0, and an entropy of 0: with an advantage of 0 their loss is 0.

    Args:
        plain: TRL's method.
        batch_size: rows of a chunk, of passes that are not over the micro-batch.
        passed: the micro-batch; it learns which tokens have loss, and what its first pass gives.
    """
    features = trainer.features
    if passed is None or model is not passed.model or not torch.is_grad_enabled():  # a critic's model, an evaluation
        with trainer.passes.around(model, inputs["logits_to_keep"], counts=trainer.model.training):
            return plain(model, **inputs, batch_size=batch_size)
    loss_mask = _loss_mask(trainer, passed.inputs)
    runs_images = not features.skip_images.enabled and inputs.get("pixel_values") is not None
    if not runs_images and not loss_mask.any() and _may_run_nothing(trainer):
        return _score_nothing(passed, loss_mask)
    images = _returned_images(trainer, model, inputs)
    window = _window(trainer, model, loss_mask, inputs, images)
    runs = loss_mask if images is None else loss_mask | images
    cut = runs if features.skip_padding.enabled else None
    try:
        part = trim_inputs(inputs, window, cut)
    except DataError:  # whose pixels belong to which row is not known: none is left out
        window = replace(window, rows=list(range(len(loss_mask))))
        part = trim_inputs(inputs, window, cut)
    passed.loss_mask, passed.rows_run = loss_mask, len(window.rows)
    causal = causal_model(model)
    head = score_only_tokens(causal, base_of(causal), loss_mask[window.rows, : window.completion])
    packs = features.pack_completions.enabled
    if trainer.dummy_image is not None:
        trainer.dummy_image.stands_in = has_images(inputs) and not has_images(part)
    head_values = None if trainer.critic is None else trainer.critic.head
    keeps_hidden = trainer.kl.full is not None or head_values is not None
    with ExitStack() as stack:
        if features.skip_head.enabled:
            stack.enter_context(head)
        again = passed.inputs.get(READ_AGAIN)  # None: no plan of micro-batches
        again = again and [again[row] and window.images for row in window.rows]
        stack.enter_context(trainer.passes.around(model, window.completion, packs=packs, again=again))
        states = stack.enter_context(read_hidden_states(model, window.completion)) if keeps_hidden else []
        logps, entropies, aux_loss = plain(model, **part)
    logps = scatter_back(logps, window, loss_mask, passed.inputs.get(OLD_LOGPS))
    if not hasattr(passed, "logps"):
        if (old := passed.inputs.get(OLD_LOGPS)) is not None:
            # TRL's `_compute_loss` reads the inputs only after its pass through the model, so what is completed here is
            # what it divides by; `tests/credit/test_trl_losses.py` fails if that changes. Later iterations read it too.
            passed.inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)
        passed.logps, passed.hidden = logps, next(iter(states), None)
        if head_values is not None:
            passed.values = scatter_back(head_values(states[0].detach()), window, loss_mask, None)
    return logps, None if entropies is None else scatter_back(entropies, window, loss_mask, None), aux_loss


def _may_run_nothing(trainer: ConstructedTrainer) -> bool:
    """Whether a micro-batch without loss may do without a pass: gradients of 0 are there already, or not wanted.

    Where processes exchange gradients, or parts of weights, all have to run the model.
    """
    features, accelerator = trainer.features, trainer.accelerator
    alone = accelerator.num_processes == 1 or not is_last_micro_batch()
    whole = accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    skips = features.skip_zero_advantage.enabled and features.skip_padding.enabled
    reads_hidden = trainer.critic is not None or trainer.kl.full is not None
    lending = trainer.shared_passes.lending
    closes = lending is not None and lending.open and is_last_micro_batch()  # its pass runs open prompts backward
    if not (alone and whole and skips) or reads_hidden or closes or trainer.optimizer is None:
        return False
    weights = (weight for group in trainer.optimizer.param_groups for weight in group["params"])
    return all(weight.grad is not None for weight in weights)


def _score_nothing(passed: TrainingPass, loss_mask: torch.Tensor) -> Scored:
    """Return what a pass over no token gives, with a graph that reaches no weight."""
    anchor = torch.zeros((), device=loss_mask.device, requires_grad=True)
    old = passed.inputs.get(OLD_LOGPS)
    constants = torch.zeros(loss_mask.shape, device=loss_mask.device) if old is None else old.nan_to_num()
    if old is not None:  # of a first pass, which was to complete them
        passed.inputs[OLD_LOGPS] = constants
    passed.loss_mask, passed.rows_run = loss_mask, 0
    if not hasattr(passed, "logps"):
        passed.logps, passed.hidden = constants + anchor, None
    return constants + anchor, torch.zeros_like(constants), None


def _returned_images(trainer: ConstructedTrainer, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return the image tokens of completions, (N, T) bool; None without tools."""
    if not trainer.tools or inputs.get("pixel_values") is None:
        return None
    images = is_image_token(inputs["input_ids"][:, -inputs["logits_to_keep"] :], causal_model(model).config)
    return images | torch.nn.functional.pad(images[:, :-1], (1, 0))  # and what follows them, behind which prompts share


def _window(
    trainer: ConstructedTrainer,
    model: nn.Module,
    loss_mask: torch.Tensor,
    inputs: dict[str, Any],
    images: torch.Tensor | None,
) -> Window:
    """The smallest part of a micro-batch that has all tokens with loss, and `images`."""
    features, completion, multiple = trainer.features, inputs["logits_to_keep"], trainer.pad_to_multiple_of or None
    rows, padding = features.skip_zero_advantage.enabled, features.skip_padding.enabled
    runs_images = not features.skip_images.enabled and inputs.get("pixel_values") is not None
    if rows and padding and not runs_images and not loss_mask.any():
        is_image = is_image_token(inputs["input_ids"], causal_model(model).config)
        if (window := find_text(is_image, completion, multiple)) is not None:
            return window
    num_images = inputs.get("num_images") if runs_images else None
    prompt_mask = inputs["attention_mask"][:, :-completion]
    return find_window(loss_mask, prompt_mask, num_images, rows=rows, padding=padding, multiple=multiple, images=images)


def _loss_mask(trainer: ConstructedTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """The tokens whose log-probabilities the loss reads, (N, T) bool."""
    rows, tokens = trainer.features.skip_zero_advantage, trainer.features.skip_zero_advantage_tokens
    return find_loss_mask(batch["advantages"], valid_tokens(batch), rows=rows.enabled, tokens=tokens.enabled)


def _extents(trainer: ConstructedTrainer, batch: dict[str, Any]) -> list[Extent]:
    """Return the columns of each row of a batch that run."""
    rows, padding = trainer.features.skip_zero_advantage.enabled, trainer.features.skip_padding.enabled
    return extents_of(_loss_mask(trainer, batch), batch["prompt_mask"], rows=rows, padding=padding)


def _closes_early(trainer: ConstructedTrainer) -> bool:
    """Whether a prompt may run backward before the micro-batch in which processes exchange their gradients.

    That micro-batch may not run the vision tower, whose gradients DDP then leaves out unless it looks for them.
    """
    alone = trainer.accelerator.num_processes == 1 or not trainer._is_vlm
    return alone or bool(trainer.args.ddp_find_unused_parameters)


def shuffle_rows(trainer: ConstructedTrainer) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what takes the place of TRL's `shuffle_sequence_dict`; None: nothing does."""
    args, lends = trainer.args, trainer.shared_passes.lending is not None
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    window = args.per_device_train_batch_size * min(accumulated, generated)  # rows of a rollout in an optimizer step

    def arrange(batch: dict[str, Any], order: Sequence[int], groups: Sequence[int]) -> list[int]:
        if trainer.features.group_by_length.enabled:
            lengths = [extent.completion if extent.runs else 0 for extent in _extents(trainer, batch)]
            return group_by_length(order, groups, lengths, window)
        return sort_by_group(order, groups) if trainer.features.regroup.enabled else list(order)

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        config = causal_model(trainer.model).config
        is_image = partial(is_image_token, config=config) if trainer.tools else None
        batch = shuffle_whole_groups(batch, partial(arrange, batch), is_image)
        if lends and not _closes_early(trainer):
            batch[READ_AGAIN] = [True] * len(batch[PROMPT_GROUP])
        elif lends:
            runs = [extent.runs for extent in _extents(trainer, batch)]
            cuts_rollout = bool(accumulated % generated and generated % accumulated)
            groups, size = batch[PROMPT_GROUP], args.per_device_train_batch_size
            batch[READ_AGAIN] = find_read_again(groups, runs, size, len(groups) if cuts_rollout else window)
        return batch

    arranges = trainer.features.group_by_length.enabled or trainer.features.regroup.enabled
    return shuffle if arranges or lends else None
