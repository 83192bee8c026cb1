"""Values of tokens from hidden states: of the policy's own passes, or of a model beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import base_of, causal_model
from vgr_trl.signals.rollout import policy_is_active


class ValueHead(nn.Module):
    """One number for each hidden state, in float32 whatever the passes run in; 0 before it is trained.

    Args:
        width: D, of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, T) float32, for hidden states (N, T, D)."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: torch.Tensor = self.linear(hidden.float())  # (N, T, 1)
            return values.squeeze(-1)


class HeadReader:
    """Reads values off the passes of a policy, which they do not train.

    Args:
        policy: the model, also wrapped.
        head: of the values.
    """

    def __init__(self, policy: Any, head: ValueHead) -> None:
        self._causal, self._head = causal_model(policy), head
        self._found: list[torch.Tensor] = []

    @contextmanager
    def around(self, model: Any, completion_length: int | None) -> Iterator[None]:
        """Read the values of the tokens that each pass of this block through the policy emits.

        Args:
            model: passed through; nothing is read of references.
            completion_length: T; None where the model generates, of which nothing is read.
        """
        causal = causal_model(model)
        if completion_length is None or causal is not self._causal or not policy_is_active(model):
            yield
            return
        base = base_of(causal)
        plain, self._found = base.forward, []

        @wraps(plain)
        def read(*args: Any, **kwargs: Any) -> Any:
            outputs = plain(*args, **kwargs)
            hidden = outputs.last_hidden_state[:, -completion_length - 1 : -1]  # (N, T, D)
            self._found.append(self._head(hidden.detach()))
            return outputs

        with replaced(base, "forward", read):
            yield

    def take(self) -> torch.Tensor | None:
        """Return the values (N, T) of the latest block in which something was read, once."""
        found, self._found = self._found, []
        return torch.cat(found) if found else None


class ValueModel(nn.Module):
    """A copy of the policy with a scalar head in place of its own, which TRL's scoring can call.

    It trains what the policy trains when it is copied.

    Args:
        policy: the model, not wrapped by DDP yet.
        head: of the values.
    """

    def __init__(self, policy: Any, head: ValueHead) -> None:
        super().__init__()
        self.module = deepcopy(base_of(causal_model(policy)))  # where `causal_model` looks for it
        self.head = head

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool, **inputs: Any
    ) -> FusedCausalLMOutput:
        """Return values (N, S - 1) of the tokens that each position emits where TRL expects log-probabilities."""
        outputs = self.module(input_ids=input_ids, **inputs, use_cache=False, return_dict=True)
        return FusedCausalLMOutput(log_probs=self.head(outputs.last_hidden_state[:, :-1]))


def hidden_width(policy: Any) -> int:
    """Return D, the width of the last hidden states of a model, also wrapped."""
    return int(causal_model(policy).config.get_text_config(decoder=True).hidden_size)
