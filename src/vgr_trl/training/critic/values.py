"""Values of tokens from hidden states: of the policy's own passes, or of a model beside it."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from vgr_trl.sharing.backbone import base_of, causal_model
from vgr_trl.signals.measurement import policy_is_active
from vgr_trl.training.passes.emitted import EmittedReader


class ValueHead(nn.Module):
    """One number for each hidden state, in float32 whatever the passes run in; 0 before it is trained."""

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


def value_reader(policy: nn.Module, head: ValueHead) -> EmittedReader:
    """Return what reads values (N, T) off the passes of a policy, which they do not train, and off no reference's."""
    causal = causal_model(policy)
    return EmittedReader(
        lambda hidden: head(hidden.detach()), lambda model: causal_model(model) is causal and policy_is_active(model)
    )


class ValueModel(nn.Module):
    """A copy of the policy with a scalar head in place of its own, which TRL's scoring can call.

    It trains what the policy trains when it is copied.

    Args:
        policy: the model, not wrapped by DDP yet.
    """

    def __init__(self, policy: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.module = deepcopy(base_of(causal_model(policy)))  # where `causal_model` looks for it
        self.head = head

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool, **inputs: Any
    ) -> FusedCausalLMOutput:
        """Return values (N, S - 1) of the tokens that each position emits where TRL expects log-probabilities."""
        outputs = self.module(input_ids=input_ids, **inputs, use_cache=False, return_dict=True)
        return FusedCausalLMOutput(log_probs=self.head(outputs.last_hidden_state[:, :-1]))


def hidden_width(policy: nn.Module) -> int:
    """Return D, the width of the last hidden states of a model, also wrapped."""
    return int(causal_model(policy).config.get_text_config(decoder=True).hidden_size)
