"""The signals of a batch, from the pass that measures them to the estimator that uses them.

verl's registered estimators get rewards and a mask, nothing else of the batch; so what was measured is laid at hand
around the call, by the trainer that has the batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from vgr_trl.batch.signals import AttentionMass, RolloutSignals
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.options import SignalOptions

COLUMNS = ("vgr_vision", "vgr_instruction", "vgr_token", "vgr_dependency")  # in a batch, (N, T) each


@dataclass
class SignalsAtHand:
    """What an estimator of this library may read beside verl's arguments.

    Attributes:
        options: of the run.
        columns: name -> (N, T) of `COLUMNS`, and `entropies` and `old_log_probs` where they are known.
        token_weights: (N, T), where they came with the rollout.
        metrics: filled by the estimator; what the trainer logs.
        response_mask: filled by the estimator where token weights are applied to the mask.
    """

    options: SignalOptions
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_weights: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    response_mask: torch.Tensor | None = None

    def attention(self, mask: torch.Tensor, name: str = "vgr_token") -> AttentionMass | None:
        """Return the attention per token of one kind, as a mass of one layer; None if it was not measured.

        Args:
            mask: (N, T) bool.
            name: `vgr_token`, of the layers that token weights read, or `late`, of the layers that rewards read.
        """
        one = torch.ones(len(mask), dtype=torch.long, device=mask.device)
        if name == "vgr_token" and "vgr_token" in self.columns:
            ratio = self.columns["vgr_token"].to(mask.device).float()  # a ratio over an attention of 1
            return AttentionMass(torch.ones_like(ratio)[None], ratio[None], one, one, mask)
        if "vgr_vision" not in self.columns:
            return None
        vision, instruction = (
            self.columns[side].to(mask.device).float()[None] for side in ("vgr_vision", "vgr_instruction")
        )
        return AttentionMass(vision, instruction, one, one, mask)

    def signals(self, response_mask: torch.Tensor) -> RolloutSignals:
        """Return what was measured as the signals that credit reads; NaN where log-probabilities are not known.

        Args:
            response_mask: (N, T).
        """
        mask = response_mask.bool()
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        logps, entropies = (self.columns.get(name, unknown).to(mask.device) for name in ("old_log_probs", "entropies"))
        dependency = self.columns.get("vgr_dependency")
        return RolloutSignals(
            logps.float(),
            entropies.float(),
            mask,
            self.attention(mask),
            None if dependency is None else dependency.to(mask.device).float(),
        )


_AT_HAND: ContextVar[SignalsAtHand | None] = ContextVar("signals_at_hand", default=None)


@contextmanager
def lay_at_hand(signals: SignalsAtHand) -> Iterator[SignalsAtHand]:
    """Let estimators find the signals of a batch for the duration."""
    token = _AT_HAND.set(signals)
    try:
        yield signals
    finally:
        _AT_HAND.reset(token)


def at_hand(name: str) -> SignalsAtHand:
    """Return the signals of the batch at hand, for the estimator of that name.

    Raises:
        ConfigError: none are.
    """
    found = _AT_HAND.get()
    if found is None:
        raise ConfigError(
            f"The advantage estimator {name} got no signals: set trainer.v1.trainer_mode=vgr_sync, whose trainer hands "
            "them over, or call it in lay_at_hand."
        )
    return found


def columns_in(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return those of `COLUMNS` that a batch has."""
    return {name: batch[name] for name in COLUMNS if name in batch}
