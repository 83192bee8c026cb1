"""`share_prompts`: compute equal prompts once in `forward`, backward and `generate` of a model.

`SharedPasses` does the same around the passes of a trainer.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import gather
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.attention import keep_keys_unrepeated
from vgr_trl.sharing.lending import Lending, why_not_lend
from vgr_trl.sharing.model_support import base_of, causal_model, distributed_type
from vgr_trl.sharing.report import SharingReport
from vgr_trl.sharing.shared_forward import ModelChecks, SharedForward, ignore_empty_images
from vgr_trl.sharing.shared_generate import SharedGeneration


@contextmanager
def share_prompts(model: nn.Module, completion_length: int | None = None, **modes: Any) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once in forward, backward and `generate`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    A prompt whose completions lie in several micro-batches runs once for all of them, forward and backward, where
    accelerate accumulates gradients, as in TRL; with adapters, once for each. Results equal those of plain passes up to
    the order of additions. Other calls run plainly, and the report says why. With active dropout or router noise, the
    completions of a prompt share the random numbers of their prompt, and a warning says so.

    If `completion_length` is None, the main process prints after the first step how many prompts were computed. Calls
    from several threads take turns.

    Example:
        >>> model, processor = build_tiny_vlm([])  # of vgr_trl.demo.tiny_model
        >>> tokens = torch.tensor([[70, 71, 72, 80], [70, 71, 72, 81]])  # two completions of a prompt
        >>> with torch.no_grad(), share_prompts(model, completion_length=1) as report:
        ...     logits = model(input_ids=tokens, logits_to_keep=2).logits
        >>> print(report)
        computed 1 prompts for 2 rows

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. The
            outputs then score completions only: hidden states of prompts and padding are 0.
            None: the longest common beginnings of the rows are shared, and all outputs are computed; those of padding
            may differ from a plain pass.
        modes: arguments of `SharedForward` for a run with several processes or its own micro-batches.

    Yields:
        Counts of rows and prompts, and the reasons why calls ran plainly, updated until the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, `completion_length` is below 1, or another thread shares prompts
            of this model.
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
    own = None if why or not is_alone or any(isinstance(x, BaseTunerLayer) for x in base.modules()) else Lending(base)
    forward.lending, forward.first_step = own or forward.lending, {} if tells else None
    if tells and forward.agree is not None:
        print(f"share_prompts shares prompts within a micro-batch, not over several ({why}). {_ADVICE}", flush=True)
    with ExitStack() as stack:
        stack.enter_context(patched_method(base, "forward", forward))
        if base is not causal and hasattr(causal, "generate"):
            shared = SharedGeneration(causal, causal.generate, forward)
            stack.enter_context(patched_method(causal, "generate", shared))
        if is_alone:
            stack.enter_context(causal.register_forward_pre_hook(_read_labels, with_kwargs=True))
        if own is not None:
            stack.enter_context(_forget_at_end(own))
        yield report


_ADVICE = "Best: per_device_train_batch_size num_generations, and gradient_accumulation_steps divided by as much."


def _modes_of_engine() -> dict[str, Any]:
    """Return arguments of `SharedForward` with which all processes share a batch or none, under DeepSpeed and FSDP."""
    kind = distributed_type()
    if kind not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return {}
    state = AcceleratorState()
    sharded = kind == DistributedType.FSDP or state.deepspeed_plugin.zero_stage == 3

    def all_agree(answer: bool) -> bool:
        votes = sharded or torch.is_grad_enabled()
        return bool(gather(torch.tensor([answer], device=state.device)).all()) if votes else answer

    return {"agree": all_agree, "sharded": sharded}


def _read_labels(causal: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set `labelled` of a model's `SharedForward` from the labels of TRL's scoring; a hook, also of pickled models."""
    forward = getattr(base_of(causal).forward, "function", None)
    if isinstance(forward, SharedForward):  # which a copy of the model has not
        labels, forward.labelled = kwargs.get("labels"), None
        wanted = torch.is_grad_enabled() or forward.agree is not None  # which have to decide together
        if wanted and kwargs.get("fused_lm_head") and labels is not None:
            labelled = (labels != -100).any(0).nonzero()
            forward.labelled = labels.size(1) - int(labelled[0]) if len(labelled) else None


@contextmanager
def _forget_at_end(lending: Lending) -> Iterator[None]:
    """Forget open prompts at the end of this block, and warn if they lost their gradients."""
    try:
        yield
        if lending.open:  # training or the block ended within an optimizer step
            lost = f"{len(lending.open)} prompts ran forward but not backward, and lost their gradients"
            warnings.warn(f"{lost}: end the block of share_prompts after an optimizer step.", stacklevel=2)
    finally:
        lending.clear()


class SharedPasses:
    """Shares prompts in all forward passes of a training run.

    Args:
        agree: returns whether an answer is True in all processes.
        sharded: whether parameters are sharded.
        in_order: whether gradients are reduced in the order of arrival, which has to be equal in all processes.
        evens_images: whether the caller runs the vision tower in every process if it runs in one.

    Attributes:
        lending: prompts lent to several micro-batches of the trained model; None: no prompt is lent.
    """

    def __init__(self, agree: Callable[[bool], bool], *, sharded: bool, in_order: bool, evens_images: bool) -> None:
        self._agree, self._sharded, self._in_order = agree, sharded, in_order
        self._refuses_uneven = sharded and not evens_images
        self._report = SharingReport()
        self.lending: Lending | None = None
        self._checks: WeakKeyDictionary[nn.Module, ModelChecks] = WeakKeyDictionary()

    def reset(self) -> None:
        """Forget the prompts of an interrupted training, and how models are wrapped."""
        if self.lending is not None:
            self.lending.clear()
        self._checks.clear()

    @contextmanager
    def around(
        self,
        why_not: str | None,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        packs: bool = False,
        counts: bool = True,
        again: Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Share prompts in passes of this block.

        Args:
            why_not: why no prompts are shared; None: they are.
            model: transformers model, also wrapped.
            completion_length: T of a scored batch; None: the model generates.
            packs: whether completions run as one row without padding.
            counts: whether `metrics` counts these passes.
            again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: no prompt is
                lent to several micro-batches.
        """
        refuses = self._refuses_uneven
        if why_not is not None:
            with ignore_empty_images(model, agree=self._agree if refuses and completion_length else None):
                yield
            return
        agree = self._agree if self._sharded or (self._in_order and torch.is_grad_enabled()) else None
        modes: dict[str, Any] = {"agree": agree, "sharded": refuses, "packs": packs}
        lending = None if again is None else self.lending
        checks = self._checks.get(model) or self._checks.setdefault(model, ModelChecks(model))
        with share_prompts(model, completion_length, **modes, lending=lending, again=again, checks=checks) as report:
            yield
        if counts:
            self._report.add(report.rows, report.prompts)

    def metrics(self) -> dict[str, float]:
        """Return the prompts computed per row since the last call; empty without passes."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


def whole_groups(batch_size: int, num_generations: int) -> int:
    """Round a batch size up to a multiple of `num_generations`, for passes without gradients."""
    return -(-batch_size // num_generations) * num_generations
