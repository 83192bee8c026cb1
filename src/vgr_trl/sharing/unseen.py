"""Heads that go around their base model, where prompts cannot be shared."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from vgr_trl.sharing.backbone import is_tracing
from vgr_trl.sharing.forward import SharedForward


def with_unseen_counted(forward: Callable[..., Any], shared: SharedForward) -> Callable[..., Any]:
    """Return the forward pass of a causal model that reports calls which do not come to its base model.

    OPT, Bart and Whisper call the decoder inside of it.

    Args:
        forward: of the causal model.
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
