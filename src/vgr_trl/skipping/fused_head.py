"""TRL's fused head on some tokens of a batch, and no others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from vgr_trl.replacing import replaced_method
from vgr_trl.sharing.backbone import changed_hidden_states


@contextmanager
def only_tokens(causal: Any, base: Any, wanted: torch.Tensor | None) -> Iterator[None]:
    """Let TRL's fused head score these tokens alone: all others have log-probability and entropy 0, and no gradient.

    TRL leaves out positions only where it has Triton, and scores all that have a label.

    Args:
        causal: transformers model with TRL's fused head.
        wanted: (N, T) bool, of the last T columns of every batch that passes in this block. None: all with a label.
    """
    forward: Callable[..., Any] = causal.forward

    @wraps(forward)
    def chosen(
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        next_tokens = labels[:, 1:] if shift_labels is None and labels is not None else shift_labels  # (N, S)
        if torch.compiler.is_compiling() or not fused_lm_head or next_tokens is None:
            given = {"fused_lm_head": fused_lm_head or None, "labels": labels, "shift_labels": shift_labels}
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        scored = next_tokens != -100
        if wanted is not None:
            scored[:, : -wanted.size(1)] = False
            scored[:, -wanted.size(1) :] &= wanted

        def emitting(hidden: torch.Tensor) -> torch.Tensor:
            """(1, K, D) of (N, S or more, D)."""
            return hidden[:, : scored.size(1)][scored.to(hidden.device)].unsqueeze(0)

        with changed_hidden_states(base, emitting):
            outputs = forward(*args, fused_lm_head=True, shift_labels=next_tokens[scored].unsqueeze(0), **kwargs)
        for name in ("log_probs", "entropy"):
            if (value := getattr(outputs, name)) is not None:
                every = value.new_zeros(scored.shape)
                setattr(outputs, name, every.masked_scatter(scored.to(value.device), value))
        return outputs

    with replaced_method(causal, "forward", chosen):
        yield
