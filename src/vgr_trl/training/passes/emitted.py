"""What is read off the hidden states that emit completions, beside the passes that make them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import base_of, causal_model

Make = Callable[[torch.Tensor], torch.Tensor]


class EmittedReader:
    """Keeps what is made of the hidden states of the positions that emit completions, in the latest block.

    Args:
        make: of hidden states (N, T, D), what is kept, (N, T, …); None: themselves.
        reads: whether the passes of a model are read; None: those of all.

    Attributes:
        output_type: class of what base models return.
    """

    def __init__(self, make: Make | None = None, reads: Callable[[nn.Module], bool] | None = None) -> None:
        self._make, self._reads = make, reads
        self._found: list[torch.Tensor] = []
        self.output_type: Any = None

    @contextmanager
    def around(self, model: nn.Module, completion_length: int | None) -> Iterator[None]:
        """Read passes of this block.

        Args:
            completion_length: T; None where the model generates, of which nothing is read.
        """
        if completion_length is None or not (self._reads is None or self._reads(model)):
            yield
            return
        base = base_of(causal_model(model))
        plain, self._found = base.forward, []

        @wraps(plain)
        def read(*args: Any, **kwargs: Any) -> Any:
            outputs = plain(*args, **kwargs)
            self.output_type = type(outputs)
            hidden = outputs.last_hidden_state[:, -completion_length - 1 : -1]  # (N, T, D)
            self._found.append(hidden if self._make is None else self._make(hidden))
            return outputs

        with replaced(base, "forward", read):
            yield

    def take(self) -> torch.Tensor | None:
        """Return what was read in the latest block of which something was, once."""
        found, self._found = self._found, []
        return torch.cat(found) if found else None
