"""What a scoring pass has measured for the completions of a rollout batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vgr_trl.errors import DataError
from vgr_trl.registries import VIEW


@dataclass
class AttentionMass:
    """Attention of the emitting queries on the prompt's vision and instruction tokens, summed over keys.

    Attributes:
        vision: (L, N, T) float32 in [0, 1], mean over heads of the attention on all vision tokens together.
        instruction: (L, N, T) float32 in [0, 1], likewise on all instruction tokens.
        num_vision: (N,) int, vision tokens of each row's prompt.
        num_instruction: (N,) int, instruction tokens of each row's prompt.
        mask: (N, T) bool, completion tokens that count in the loss.
        region: (L, N, T) float32, likewise on the vision tokens of what the question is about; None: not measured.
        num_region: (N,) int, their number; None: not measured.
    """

    vision: torch.Tensor
    instruction: torch.Tensor
    num_vision: torch.Tensor
    num_instruction: torch.Tensor
    mask: torch.Tensor
    region: torch.Tensor | None = None
    num_region: torch.Tensor | None = None


@dataclass
class RolloutSignals:
    """Signals of N completions of T tokens, under the policy that generated them.

    Attributes:
        logps: (N, T) float32, log-probabilities of the completion tokens; NaN if they were not measured.
        entropies: (N, T) float32, in nats; NaN if they were not measured.
        mask: (N, T) bool, completion tokens that count in the loss.
        attention: attention mass; None if it was not measured.
        dependency: (N, T) float32 in [0, 10], `visual_dependency` of the tokens; None if it was not measured.
        extra: name -> (N, T) float32, signals that were asked for by name; NaN where undefined.
        similarity: (N, T) float32 in [-1, 1], of the hidden state that emits a token to those of the image; NaN without
            one, None if it was not measured.
        views: name of a perturbation -> (N, T) float32, log-probabilities of the tokens given images so perturbed; NaN
            without an image.
        jsd: (N, T) float32 in [0, ln 2], Jensen-Shannon divergence of what a token is drawn from given the image, and
            given the perturbed one; NaN without an image, None if it was not measured.
        perturbed_entropies: (N, T) float32, in nats, of what it is drawn from given the perturbed image, likewise.
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor
    attention: AttentionMass | None = None
    dependency: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    similarity: torch.Tensor | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    jsd: torch.Tensor | None = None
    perturbed_entropies: torch.Tensor | None = None

    def measured(self, need: str) -> Any:
        """Return a measurement by its name among the needs of plug-ins, None if it was not made."""
        if need.startswith(VIEW):
            return self.views.get(need.removeprefix(VIEW))
        return (self.views or None) if need == "views" else getattr(self, need)

    @property
    def shift(self) -> torch.Tensor | None:
        """`jsd`, which is measured together with `perturbed_entropies`."""
        return self.jsd

    @property
    def regions(self) -> torch.Tensor | None:
        """Attention on what the questions are about, (L, N, T); None if it was not measured."""
        return None if self.attention is None else self.attention.region


@contextmanager
def read_only(who: str, *given: Any) -> Iterator[None]:
    """In this block a plug-in may read tensors, and what holds them, but not change them in place.

    Raises:
        DataError: it did, naming `who`.
    """
    before = [(tensor, tensor._version) for tensor in _tensors(given) if not tensor.is_inference()]
    yield
    if any(tensor._version != version for tensor, version in before):
        raise DataError(f"{who} changed in place what it was given: make new tensors, a * 2 where a.mul_(2) stands.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, RolloutSignals | AttentionMass):
        value = vars(value)
    if isinstance(value, Mapping | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def unmeasured(mask: torch.Tensor) -> RolloutSignals:
    """Return the signals of completions of which nothing was measured but which tokens count, (N, T) bool."""
    nothing = torch.full(mask.shape, torch.nan, device=mask.device)
    return RolloutSignals(nothing, nothing, mask)
