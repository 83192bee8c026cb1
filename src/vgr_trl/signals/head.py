"""Log-probabilities and entropies from hidden states, by the model's own head: few positions at a time, or few rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.sharing import replaced
from vgr_trl.sharing.backbone import causal_model, changed_hidden_states
from vgr_trl.signals.decoder import find_decoder
from vgr_trl.signals.dependency import jensen_shannon

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

LOGITS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**26}  # 32 MB and 256 MB in float32; a GPU wants larger products


class Head:
    """What a model makes of last hidden states, with whatever it scales, caps or casts on the way.

    The model's own forward pass runs, with a base model that hands it the hidden states.

    Args:
        causal: transformers model with a head.
        output_type: class of what its base model returns.
    """

    def __init__(self, causal: Any, output_type: Callable[..., Any]) -> None:
        self.causal, self.output_type = causal, output_type
        self.vocabulary: int = causal.config.get_text_config(decoder=True).vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(C, vocabulary), for hidden states (C, D).

        Raises:
            ConfigError: the model's forward pass calls neither its base model nor its decoder.
        """
        outputs = self.output_type(last_hidden_state=hidden.unsqueeze(0))
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return outputs

        base, decoder = self.causal.base_model, find_decoder(self.causal)  # OPT's head calls the decoder of its base
        with replaced(base, "forward", forward), replaced(decoder, "forward", forward):
            logits: torch.Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        if calls != 1:
            raise ConfigError(
                f"{type(self.causal).__name__} called its base model {calls} times where one call was expected: its "
                "head cannot be used alone, score with its own forward pass."
            )
        return logits

    def score(
        self, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of `tokens` and entropies of what they are drawn from, 0 where `mask` is False.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
            tokens: (N, T) int64.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, entropies in nats.
        """
        return self._by_position(self._score, mask, temperature, hidden, tokens)

    def shift(
        self, hidden: torch.Tensor, others: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how far two passes differ in what tokens are drawn from, and the entropies of the other pass.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
            others: (N, T, D), of the same queries in the other pass.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, the Jensen-Shannon divergence and entropies, in nats; 0 where `mask` is False.
        """
        return self._by_position(self._shift, mask, temperature, hidden, others, passes=2)

    def positions_at_a_time(self, device: torch.device, passes: int = 1) -> int:
        """Return for how many positions there is room for logits of so many passes."""
        return max(LOGITS_AT_A_TIME.get(device.type, LOGITS_AT_A_TIME["cpu"]) // (passes * self.vocabulary), 1)

    def _by_position(
        self,
        measure: Callable[..., torch.Tensor],
        mask: torch.Tensor,
        temperature: float,
        *of_tokens: torch.Tensor,
        passes: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two numbers of each position of the mask, some at a time, 0 elsewhere."""
        device = of_tokens[0].device
        count = self.positions_at_a_time(device, passes)
        found = torch.zeros(2, *mask.shape, device=device)
        if mask.any():
            parts = zip(*(values[mask].split(count) for values in of_tokens), strict=True)
            found[:, mask] = torch.cat([measure(*part, temperature) for part in parts], dim=1)
        return found[0], found[1]

    def _shift(self, hidden: torch.Tensor, others: torch.Tensor, temperature: float) -> torch.Tensor:
        logits, other = (self.logits(states).float() / temperature for states in (hidden, others))
        logps = torch.log_softmax(other, dim=-1)
        entropies = -torch.linalg.vecdot(logps.exp(), logps.clamp(min=torch.finfo(logps.dtype).min))
        return torch.stack([jensen_shannon(logits, other), entropies])

    def _score(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        logits = self.logits(hidden).float()  # (C, vocabulary)
        logps = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
        del logits
        chosen = logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        probabilities = logps.exp()
        # A forbidden token has the logit -inf and adds nothing.
        entropies = -torch.linalg.vecdot(probabilities, logps.clamp_(min=torch.finfo(logps.dtype).min))
        return torch.stack([chosen, entropies])


@contextmanager
def head_of_rows(model: nn.Module, rows: Sequence[int] | None) -> Iterator[None]:
    """Let passes that ask for TRL's fused head go through it with some rows only; what they return of others is NaN.

    Args:
        rows: of the batch, whose chunks pass in order; None: no row. Where there are rows, each chunk takes at least
            one, so that processes which share a sharded head call it equally often.
    """
    from trl.trainer.utils import FusedCausalLMOutput  # only TRL's passes come here, and this room runs without TRL

    causal = causal_model(model)
    plain, passed = causal.forward, 0

    def forward(*args: Any, fused_lm_head: bool, **kwargs: Any) -> "FusedCausalLMOutput":
        nonlocal passed
        labels = {name: kwargs.pop(name) for name in ("labels", "shift_labels") if name in kwargs}
        shape = next(iter(labels.values())).shape
        if rows is None:
            hidden = causal.base_model(*args, **kwargs, use_cache=False).last_hidden_state
            nothing = hidden.new_full(shape, torch.nan, dtype=torch.float32)
            return FusedCausalLMOutput(log_probs=nothing, entropy=nothing)
        chosen = [row - passed for row in rows if passed <= row < passed + shape[0]] or [0]
        passed += shape[0]
        own = {name: values[chosen] for name, values in labels.items()}
        with changed_hidden_states(causal.base_model, itemgetter(chosen)):
            outputs = plain(*args, fused_lm_head=True, **own, **kwargs)
        return FusedCausalLMOutput(
            log_probs=_among(shape[0], chosen, outputs.log_probs), entropy=_among(shape[0], chosen, outputs.entropy)
        )

    forward.of_rows = True  # type: ignore[attr-defined]
    with replaced(causal, "forward", forward):
        yield


def leaves_rows_out(model: nn.Module) -> bool:
    """Whether passes of a model leave out the head for some rows, by `head_of_rows`."""
    return hasattr(causal_model(model).forward, "of_rows")


def _among(count: int, rows: list[int], values: torch.Tensor) -> torch.Tensor:
    """Values of some rows as those of all; NaN elsewhere."""
    every = values.new_full((count, *values.shape[1:]), torch.nan, dtype=torch.float32)
    every[rows] = values.float()
    return every
