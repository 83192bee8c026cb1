"""`share_prompts`: compute equal prompts once in `forward`, backward and `generate` of a model."""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, is_initialized
from accelerate.utils import gather
from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.attention import keep_keys_unrepeated
from vgr_trl.sharing.empty_images import ignore_empty_images
from vgr_trl.sharing.lending import Lending, why_not_lend
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.sharing.report import SharingReport
from vgr_trl.sharing.shared_forward import ModelChecks, SharedForward
from vgr_trl.sharing.shared_generate import SharedGeneration


@contextmanager
def share_prompts(model: nn.Module, completion_length: int | None = None, **modes: Any) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once, in `forward`, backward and `generate` of `model`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    Example:
        >>> model, processor = build_tiny_vlm([])  # of vgr_trl.demo.tiny_model
        >>> tokens = torch.tensor([[70, 71, 72, 80], [70, 71, 72, 81]])  # two completions of a prompt
        >>> with torch.no_grad(), share_prompts(model, completion_length=1) as report:
        ...     logits = model(input_ids=tokens, logits_to_keep=2).logits
        >>> print(report)
        computed 1 prompts for 2 rows

    Where accelerate accumulates gradients, as TRL lets it, a prompt whose completions lie in several micro-batches runs
    once for all of them, forward and backward.

    Log-probabilities, gradients and tokens are those of the plain passes, up to the order of additions. A call for
    which that cannot be had runs plainly, and the report says why. Dropout at work, or noise in routers, is the
    exception: the completions of a prompt then share what is drawn over their prompt, where plain passes draw for each,
    and a warning says so.

    After the first step the main process prints how many prompts were computed, if `completion_length` is None.

    Calls from several threads take turns.

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. Of
            the outputs only those that score completions can be used then: hidden states of prompts and padding are 0.
            None: rows may be anything; their longest common beginnings are shared, and all outputs are there. Those of
            padding may differ from a plain pass.
        modes: of a run with several processes or its own micro-batches, as `SharedForward` takes them.

    Yields:
        Counts of rows and prompts, and the reasons of the calls that ran plainly, until the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, `completion_length` is below 1, or another thread is in such a
            block with this model.
    """
    if completion_length is not None and completion_length < 1:
        raise ConfigError(f"completion_length is {completion_length}: give an integer of at least 1, or None.")
    causal, report = causal_model(model), SharingReport()
    base = base_of(causal)
    is_alone = completion_length is None and modes.get("agree") is None
    forward = SharedForward(base, base.forward, report, completion_length, **{**_modes_of_engine(), **modes})
    checks = forward.checks or ModelChecks(model)
    tells = is_alone and forward.checks is None and os.environ.get("RANK", "0") == "0"
    if checks.reason is not None:
        report.plain[checks.reason] += 1
        if tells:
            print(f"share_prompts shares nothing: {checks.reason}.", flush=True)
        with ignore_empty_images(model):
            yield report
        return
    keep_keys_unrepeated()
    why = why_not_lend(base) if is_alone else None
    own = Lending(base) if is_alone and why is None else None
    forward.lending, forward.first_step = own or forward.lending, {} if tells else None
    if tells and forward.agree is not None:
        print(f"share_prompts shares prompts within a micro-batch, not over several ({why}). {_ADVICE}", flush=True)
    with ExitStack() as stack:
        stack.enter_context(patched_method(base, "forward", forward))
        if base is not causal and hasattr(causal, "generate"):
            shared = SharedGeneration(causal, causal.generate, forward)
            stack.enter_context(patched_method(causal, "generate", shared))
        if is_alone:
            stack.enter_context(_reading_labels(causal, forward))
        if own is not None:
            stack.enter_context(_lending(own))
        yield report


_ADVICE = "Best: per_device_train_batch_size num_generations, and gradient_accumulation_steps divided by as much."


def _modes_of_engine() -> dict[str, Any]:
    """Return the modes of `SharedForward` under DeepSpeed and FSDP, where all processes share a batch or none."""
    kind = AcceleratorState().distributed_type if is_initialized() else None
    if kind not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return {}
    state = AcceleratorState()
    sharded = kind == DistributedType.FSDP or state.deepspeed_plugin.zero_stage == 3

    def all_agree(answer: bool) -> bool:
        votes = sharded or torch.is_grad_enabled()
        return bool(gather(torch.tensor([answer], device=state.device)).all()) if votes else answer

    return {"agree": all_agree, "sharded": sharded}


@contextmanager
def _reading_labels(causal: Any, forward: "SharedForward") -> Iterator[None]:
    """Read where completions begin off the labels of TRL's scoring."""

    def read(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels, forward.labelled = kwargs.get("labels"), None
        wanted = torch.is_grad_enabled() or forward.agree is not None  # or one process decides for all
        if wanted and kwargs.get("fused_lm_head") and labels is not None:
            labelled = (labels != -100).any(0).nonzero()
            forward.labelled = labels.size(1) - int(labelled[0]) if len(labelled) else None

    with causal.register_forward_pre_hook(read, with_kwargs=True):
        yield


@contextmanager
def _lending(lending: Lending) -> Iterator[None]:
    """Forget open prompts at the end of the block."""
    try:
        yield
        if lending.open:  # of a training that has stopped within an optimizer step, or of a block that ends in one
            lost = f"{len(lending.open)} prompts have run forward and not backward, and lost their gradients"
            warnings.warn(f"{lost}: end the block of share_prompts behind an optimizer step.", stacklevel=2)
    finally:
        lending.clear()
