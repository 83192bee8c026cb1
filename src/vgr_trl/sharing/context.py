"""`share_prompts`: prompt sharing around forward, backward and `generate` of one model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.replacing import replaced_method
from vgr_trl.sharing.backbone import base_of, causal_model, is_compiled
from vgr_trl.sharing.counts import SharingReport
from vgr_trl.sharing.fitness import why_adapter_reads_whole_rows
from vgr_trl.sharing.forward import SharedForward
from vgr_trl.sharing.generation import SharedGeneration
from vgr_trl.sharing.heads import with_scored_columns, with_unseen_counted
from vgr_trl.sharing.image_inputs import without_empty_images


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
        stack.enter_context(replaced_method(base, "forward", forward))
        if base is not causal:
            head = with_unseen_counted(causal.forward, forward)
            if completion_length is not None:
                head = with_scored_columns(head, base, completion_length, forward.lock)
            stack.enter_context(replaced_method(causal, "forward", head))
        if base is not causal and hasattr(causal, "generate"):
            generate = SharedGeneration(causal, causal.generate, forward, report)
            stack.enter_context(replaced_method(causal, "generate", generate))
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

    with replaced_method(base, "forward", forward):
        yield
