"""Heads around a base model whose prompts are shared.

Some do not come to their base model at all. TRL's fused head projects all P + T columns of every row where it has no
Triton, on CPUs for example, and drops what belongs to no completion afterwards: with a large vocabulary that costs more
than the prompts do, so it is given the columns that emit completions, and no others.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from vgr_trl.sharing.backbone import changed_hidden_states, is_tracing
from vgr_trl.sharing.forward import SharedForward


def with_unseen_counted(forward: Callable[..., Any], shared: SharedForward) -> Callable[..., Any]:
    """Return the forward pass of a causal model that reports calls which do not come to its base model.

    OPT, Bart and Whisper call the decoder inside of it.

    Args:
        shared: what its base model's forward pass has been replaced by.
    """

    @wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # Whoever has replaced the base model's forward once more, as for a head alone, wants no pass through it.
        replaced_again = getattr(shared.base.forward, "function", None) is not shared
        if is_tracing() or shared.paused or replaced_again:
            return forward(*args, **kwargs)
        before = shared.calls
        outputs = forward(*args, **kwargs)
        if shared.calls == before:
            ids = kwargs.get("input_ids", args[0] if args else None)
            rows = len(ids) if isinstance(ids, torch.Tensor) else 0
            shared.report.add_plain(rows, "a head that does not call its base model")
        return outputs

    return counted


def with_scored_columns(
    forward: Callable[..., Any], base: Any, completion_length: int, lock: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return the forward pass of a causal model whose fused head scores the last T columns only.

    What the head returns has T columns instead of P + T - 1; other calls are passed on, as are compiled ones.

    Args:
        forward: of a model, patched by TRL's `add_fused_lm_head` or not.
        lock: held while the base model is made to return fewer columns.
    """

    @wraps(forward)
    def narrow(*args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if is_tracing() or not fused_lm_head or labels is None or labels.size(1) <= completion_length:
            given = {"fused_lm_head": fused_lm_head or None, "labels": labels}
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        with lock, changed_hidden_states(base, lambda hidden: hidden[:, -completion_length - 1 : -1]):  # (N, T, D)
            return forward(*args, fused_lm_head=True, shift_labels=labels[:, -completion_length:], **kwargs)

    return narrow
