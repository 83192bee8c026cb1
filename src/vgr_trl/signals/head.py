"""Compute log-probabilities and entropies from hidden states, by the model's own head, a few positions at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.model_support import base_of, causal_model, replace_hidden_states
from vgr_trl.signals.probe import find_decoder
from vgr_trl.signals.ratios import entropies_of, jensen_shannon

LOGITS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**26}  # 32 MB and 256 MB in float32; a GPU wants larger products


class _HiddenStates(dict[str, Any]):
    """Stands in for the outputs of a base model: last hidden states by name and by index, None for other outputs."""

    def __init__(self, states: Tensor) -> None:
        super().__init__(last_hidden_state=states)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else () if isinstance(key, slice) else super().__getitem__(key)


class Head:
    """The LM head of a model, with its logit scaling, soft-capping and casts.

    The model's own forward pass runs, with its base model replaced by one that returns given hidden states.

    Args:
        causal: transformers model with a head.
    """

    def __init__(self, causal: Any) -> None:
        self.causal = causal
        self.vocabulary: int = causal.config.get_text_config(decoder=True).vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (C, vocabulary) for hidden states (C, D).

        Raises:
            ConfigError: the model's forward pass calls neither its base model nor its decoder.
        """
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return _HiddenStates(hidden.unsqueeze(0))

        base, decoder = self.causal.base_model, find_decoder(self.causal)  # OPT's head calls the decoder of its base
        with patched_method(base, "forward", forward), patched_method(decoder, "forward", forward):
            logits: Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        if calls != 1:
            calls_base = f"{type(self.causal).__name__} called its base model {calls} times instead of once"
            raise ConfigError(f"{calls_base}: its head cannot be used alone, score with its own forward pass.")
        return logits

    def score(self, hidden: Tensor, tokens: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of tokens and entropies of their distributions, 0 where `mask` is False.

        Args:
            hidden: (N, T, D), of the positions that emit the tokens.
            tokens: (N, T) int64.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, entropies in nats.
        """

        def measure(states: Tensor, chosen: Tensor) -> Tensor:
            logps = torch.log_softmax(self.logits(states).float() / temperature, dim=-1)  # (C, vocabulary)
            return torch.stack([logps.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropies_of(logps)])

        return self._measure_by_position(measure, mask, hidden, tokens)

    def shift(self, hidden: Tensor, others: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return how far the distributions of two passes differ, and the entropies of the other pass.

        Args:
            hidden: (N, T, D), of the positions that emit the tokens.
            others: (N, T, D), of the same positions in the other pass.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, the Jensen-Shannon divergence and entropies, in nats; 0 where `mask` is False.
        """

        def measure(states: Tensor, other_states: Tensor) -> Tensor:
            logits, other = (self.logits(each).float() / temperature for each in (states, other_states))
            return torch.stack([jensen_shannon(logits, other), entropies_of(torch.log_softmax(other, dim=-1))])

        return self._measure_by_position(measure, mask, hidden, others, passes=2)

    def positions_at_a_time(self, device: torch.device, passes: int = 1) -> int:
        """Return the number of positions whose logits, of so many passes, fit into memory at once."""
        return max(LOGITS_AT_A_TIME.get(device.type, LOGITS_AT_A_TIME["cpu"]) // (passes * self.vocabulary), 1)

    def _measure_by_position(
        self, measure: Callable[..., Tensor], mask: Tensor, *of_tokens: Tensor, passes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Measure two numbers of each position of the mask, (N, T) each, 0 elsewhere."""
        device = of_tokens[0].device
        found = torch.zeros(2, *mask.shape, device=device)
        if mask.any():
            count = self.positions_at_a_time(device, passes)
            parts = zip(*(values[mask].split(count) for values in of_tokens), strict=True)
            found[:, mask] = torch.cat([measure(*part) for part in parts], dim=1)
        return found[0], found[1]


@contextmanager
def read_hidden_states(model: nn.Module, completion_length: int) -> Iterator[list[Tensor]]:
    """Yield a list to which each pass of this block adds the hidden states (N, T, D) of its emitting positions.

    Args:
        model: transformers model, also wrapped.
        completion_length: T.
    """
    states: list[Tensor] = []

    def read(hidden: Tensor) -> Tensor:
        states.append(hidden[:, -completion_length - 1 : -1])
        return hidden

    with replace_hidden_states(base_of(causal_model(model)), read):
        yield states
