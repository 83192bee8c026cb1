"""`share_prompts`: equal prompts computed once in forward, backward and `generate`, and where a run does so."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn

from vgr_trl.batch import IMAGE_INPUTS, owned
from vgr_trl.sharing.generation import SharedGeneration
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    changed_hidden_states,
    is_compiled,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.prefix_forward import SharedForward, find_groups, first_rows, without_empty_images
from vgr_trl.utils import ConfigError, Feature, patched_method


@contextmanager
def share_prompts(
    model: nn.Module,
    completion_length: int | None = None,
    *,
    agree: Callable[[bool], bool] | None = None,
    sharded: bool = True,
    packs: bool = False,
) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once, in `forward`, backward and `generate` of `model`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    Log-probabilities, gradients and tokens are those of the plain passes, up to the order of additions. A call for
    which that cannot be had runs plainly, and the report says why. Dropout at work, or noise in routers, is the
    exception: the completions of a prompt then share what is drawn over their prompt, where plain passes draw for each.

    Calls from several threads take turns.

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. Of
            the outputs only those that score completions can be used then: hidden states of prompts and padding are 0,
            and TRL's fused head returns T columns.
            None: rows may be anything; their longest common beginnings are shared, and all outputs are there.
        agree: given an answer of this process, returns whether it is that of all; needed where all processes have to
            share a batch or none: with sharded parameters, whose forward passes have to be equally many, and under
            DeepSpeed, which adds up gradients in the order in which they come.
        sharded: whether parameters are; a pass in which some processes have images and others none is refused then.
        packs: whether completions pass behind their prompts as one row without padding, where `completion_length` is
            given. Only where `why_not_pack` of the model gives no reason.

    Yields:
        Counts of rows and prompts, and the reasons of the calls that ran plainly, until the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, `completion_length` is below 1, or another thread is in such a
            block with this model.
    """
    if completion_length is not None and completion_length < 1:
        raise ConfigError(f"completion_length is {completion_length}: give an integer of at least 1, or None.")
    causal = causal_model(model)
    report = SharingReport()
    reason = "torch.compile" if is_compiled(model) else why_adapter_reads_whole_rows(model)
    if reason is not None:
        report.plain[reason] += 1
        yield report
        return
    base = base_of(causal)
    forward = SharedForward(base, base.forward, report, completion_length, agree, sharded, packs)
    with ExitStack() as stack:
        stack.enter_context(patched_method(base, "forward", forward))
        if base is not causal:
            if completion_length is not None:
                head = with_scored_columns(causal.forward, base, completion_length, forward.lock)
                stack.enter_context(patched_method(causal, "forward", head))
            if hasattr(causal, "generate"):
                generate = SharedGeneration(causal, causal.generate, forward, report)
                stack.enter_context(patched_method(causal, "generate", generate))
        yield report


@contextmanager
def leave_out_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Let a model run on rows without images although it is given pixel inputs; `share_prompts` does so by itself.

    Args:
        model: as `share_prompts` takes it; a compiled one is left alone.
        agree: likewise.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    if is_compiled(model):
        yield
        return
    plain = base.forward
    names = list(signature(plain).parameters)
    agree = agree if "pixel_values" in names else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        return plain(**without_empty_images(dict(zip(names, args, strict=False)) | kwargs, agree))

    with patched_method(base, "forward", forward):
        yield


class SharedPasses:
    """Shares prompts in the passes of a run.

    Args:
        agree: as `share_prompts` takes it.
        sharded: whether parameters are.
        in_order: whether gradients are added up in the order in which they come, which has to be that of all processes.
        evens_images: whether the caller lets the vision tower run in every process if it does in one.
    """

    def __init__(
        self, agree: Callable[[bool], bool], *, sharded: bool, in_order: bool, evens_images: bool = False
    ) -> None:
        self._agree, self._sharded, self._in_order = agree, sharded, in_order
        self._refuses_uneven = sharded and not evens_images
        self._report = SharingReport()

    @contextmanager
    def around(
        self, feature: Feature, model: nn.Module, completion_length: int | None = None, *, packs: bool = False
    ) -> Iterator[None]:
        """Share prompts in passes of this block, if the feature is on.

        Args:
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
            packs: as `share_prompts` takes it.
        """
        refuses = self._refuses_uneven
        if not feature.enabled:
            generates = completion_length is None
            with leave_out_empty_images(model, agree=self._agree if refuses and not generates else None):
                yield
            return
        alike = self._sharded or (self._in_order and torch.is_grad_enabled())
        agree = self._agree if alike else None
        with share_prompts(model, completion_length, agree=agree, sharded=refuses, packs=packs) as report:
            yield
        self._report.add(report)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


def whole_groups(batch_size: int, num_generations: int) -> int:
    """The smallest multiple of `num_generations` that is at least `batch_size`: rows of a pass without gradients."""
    return -(-batch_size // num_generations) * num_generations


def sort_by_group(permutation: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The permutation with the rows of a group brought together where the group's first row stands, order kept."""
    position: dict[int, int] = {}
    for row in permutation:
        position.setdefault(groups[row], len(position))
    return sorted(permutation, key=lambda row: position[groups[row]])


def shuffle_by_group(
    batch: dict[str, Any], arrange: Callable[[Sequence[int], Sequence[int]], list[int]] = sort_by_group
) -> dict[str, Any]:
    """TRL's `shuffle_sequence_dict` for a generation batch, with the completions of a prompt kept together.

    Draws the same random numbers. A value with no entry per row (a number, None) is kept. Pixel inputs that TRL has cut
    into rows are one object for all rows of a group, and keep no other memory.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        arrange: returns another permutation, given a random one and the number of the group of each row.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {
        name: _one_per_group(values, groups) for name, values in pixels.items() if isinstance(values, list)
    }
    order = arrange(torch.randperm(len(groups)).tolist(), groups)

    def reordered(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[row] for row in order]

    return {key: reordered(value) for key, value in batch.items()}


def _one_per_group(values: Sequence[torch.Tensor], groups: Sequence[int]) -> list[torch.Tensor]:
    kept = [owned(values[row], values[row].device) for row in first_rows(groups)]
    return [kept[group] for group in groups]


def with_scored_columns(
    forward: Callable[..., Any], base: Any, completion_length: int, lock: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return the forward pass of a causal model whose fused head scores the last T columns only.

    What the head returns has T columns instead of P + T - 1; other calls are passed on, as are compiled ones.

    Args:
        forward: of a model, patched by TRL's `add_fused_lm_head` or not.
        lock: taken while the base model returns fewer columns.
    """

    @wraps(forward)
    def narrow(*args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not fused_lm_head or labels is None or labels.size(1) <= completion_length:
            given = {"fused_lm_head": fused_lm_head or None, "labels": labels}
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        with lock, changed_hidden_states(base, lambda hidden: hidden[:, -completion_length - 1 : -1]):  # (N, T, D)
            return forward(*args, fused_lm_head=True, shift_labels=labels[:, -completion_length:], **kwargs)

    return narrow
