"""TRL's fused head on the columns that emit completions, and no others.

TRL projects all P + T columns of every row through the head where it has no Triton, on CPUs for example, and drops what
belongs to no completion afterwards: with a large vocabulary that costs more than the prompts do.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from threading import get_ident
from typing import Any

import torch

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import is_tracing


def with_scored_columns(
    forward: Callable[..., Any], base: Any, completion_length: int, lock: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return the forward pass of a causal model whose fused head scores the last T columns only.

    What the head returns has T columns instead of P + T - 1; other calls are passed on, as are compiled ones.

    Args:
        forward: of a model, patched by TRL's `add_fused_lm_head` or not.
        base: base model that it calls.
        completion_length: T.
        lock: held while the base model is made to return fewer columns.
    """

    @wraps(forward)
    def narrow(*args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if is_tracing() or not fused_lm_head or labels is None or labels.size(1) <= completion_length:
            given = {"fused_lm_head": fused_lm_head or None, "labels": labels}
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        with lock:
            plain, mine = base.forward, get_ident()

            @wraps(plain)
            def emitting(*inputs: Any, **options: Any) -> Any:
                outputs = plain(*inputs, **options)
                if get_ident() != mine:
                    return outputs
                outputs.last_hidden_state = outputs.last_hidden_state[:, -completion_length - 1 : -1]  # (N, T, D)
                return outputs

            with replaced(base, "forward", emitting):
                return forward(*args, fused_lm_head=True, shift_labels=labels[:, -completion_length:], **kwargs)

    return narrow
