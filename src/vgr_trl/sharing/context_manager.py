"""`share_prompts`: compute equal prompts once in `forward`, backward and `generate` of a model."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from accelerate.state import AcceleratorState, DistributedType, is_initialized
from accelerate.utils import gather
from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.attention import prepare_mixers
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.model_support import (
    SharingReport,
    base_of,
    causal_model,
    has_sharded_parameters,
    ignore_empty_images,
    why_no_pass_shares,
)
from vgr_trl.sharing.shared_forward import SharedForward, SharedGeneration


@contextmanager
def share_prompts(model: nn.Module, completion_length: int | None = None, **modes: Any) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once in forward, backward and `generate`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    Prompts are shared within a call: `whole_groups` puts the completions of a prompt into one micro-batch. Results
    equal those of plain passes up to the order of additions. Other calls run plainly, and the report says why. With
    active dropout or router noise, the completions of a prompt share the random numbers of their prompt, and a warning
    says so.

    Without `completion_length` the main process prints the prompts computed in the first step. Threads take turns.

    Example:
        >>> model, processor = build_tiny_vlm([])  # from vgr_trl.demo.tiny_model
        >>> tokens = torch.tensor([[70, 71, 72, 80], [70, 71, 72, 81]])  # two completions of a prompt
        >>> with torch.no_grad(), share_prompts(model, completion_length=1) as report:
        ...     logits = model(input_ids=tokens, logits_to_keep=2).logits
        >>> print(report)
        computed 1 prompts for 2 rows

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. Hidden
            states of padding and of the last column are then 0. None: the longest common beginnings of the rows are
            shared, and outputs of padding may differ from a plain pass.
        modes: arguments of `SharedForward` for a run with several processes.

    Yields:
        Counts of rows and prompts, and reasons why calls ran plainly, up to the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, another thread shares its prompts, or `completion_length` < 1.
    """
    if completion_length is not None and completion_length < 1:
        raise ConfigError(f"completion_length is {completion_length}: give an integer of at least 1, or None.")
    causal, report = causal_model(model), SharingReport()
    base = base_of(causal)
    tells = completion_length is None and modes.get("agree") is None and os.environ.get("RANK", "0") == "0"
    forward = SharedForward(base, base.forward, report, completion_length, **{**_modes_of_engine(), **modes})
    reason = why_no_pass_shares(model) if has_sharded_parameters(model) else why_not_share(model)
    if reason is not None:
        report.plain[reason] += 1
        if tells:
            print(f"share_prompts shares nothing: {reason}.", flush=True)
        with ignore_empty_images(model):
            yield report
        return
    prepare_mixers(base)
    forward.first_step = {} if tells else None
    with ExitStack() as stack:
        stack.enter_context(patched_method(base, "forward", forward))
        if base is not causal and hasattr(causal, "generate"):
            shared = SharedGeneration(causal, causal.generate, forward)
            stack.enter_context(patched_method(causal, "generate", shared))
        if completion_length is None:
            stack.enter_context(causal.register_forward_pre_hook(_read_labels, with_kwargs=True))
        yield report


def _modes_of_engine() -> dict[str, Any]:
    """Return arguments of `SharedForward` where parameters are sharded: processes then run equally many passes."""
    state = AcceleratorState() if is_initialized() else None
    zero = state and state.deepspeed_plugin
    if state is None or not (state.distributed_type == DistributedType.FSDP or (zero and zero.zero_stage == 3)):
        return {}
    return {"agree": lambda answer: bool(gather(torch.tensor([answer], device=state.device)).all())}


def _read_labels(causal: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Tell a model's `SharedForward` where the labels of TRL's scoring begin; pickled models keep this hook."""
    forward = getattr(base_of(causal).forward, "function", None)
    if isinstance(forward, SharedForward):  # a copy of the model has none
        labels, forward.labelled = kwargs.get("labels"), None
        if kwargs.get("fused_lm_head") and labels is not None:
            labelled = (labels != -100).any(0).nonzero()
            forward.labelled = labels.size(1) - int(labelled[0]) if len(labelled) else None


Arguments = TypeVar("Arguments", bound=Any)


def whole_groups(args: Arguments) -> Arguments:
    """Return arguments whose micro-batches are joined up to a group of completions, for the same update.

        args = whole_groups(GRPOConfig(...))

    `per_device_train_batch_size` is multiplied by the smallest number that makes groups whole, and
    `gradient_accumulation_steps` and `steps_per_generation` are divided by it. Losses that average over a micro-batch,
    such as bnpo, change.

    Args:
        args: options of a trainer of TRL, such as `GRPOConfig`, before it is made.

    Raises:
        ConfigError: no number makes groups whole.
    """
    args = copy(args)  # the caller may give the same options to another trainer
    size, group = args.per_device_train_batch_size, args.num_generations or 1
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    joins = (k for k in range(1, accumulated + 1) if size * k % group == accumulated % k == generated % k == 0)
    if (joined := next(joins, None)) is None:
        raise ConfigError(
            f"gradient_accumulation_steps {accumulated} and steps_per_generation {generated} cannot be divided so that "
            f"micro-batches of {size} become groups of {group}: give multiples of {group // math.gcd(size, group)}."
        )
    args.per_device_train_batch_size = size * joined
    args.gradient_accumulation_steps, args.steps_per_generation = accumulated // joined, generated // joined
    return args
