"""The KL over all words, from the last hidden states of policy and reference."""

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from vgr_trl.credit.kl import kl_penalty
from vgr_trl.errors import ConfigError
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.head import Head
from vgr_trl.training.passes.emitted import EmittedReader


class FullKL:
    """Takes hidden states through the heads of two models, some positions at a time.

    Attributes:
        reader: of the hidden states.

    Args:
        reference: likewise; None: the policy without its adapter, which must leave the head as it is.

    Raises:
        ConfigError: the adapter changes the head.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module | None, temperature: float) -> None:
        causal = causal_model(policy)
        if reference is None and isinstance(causal.get_output_embeddings(), AuxiliaryTrainingWrapper):
            raise ConfigError(
                "kl_penalty is full with an adapter that trains the model's head, which the reference would have too: "
                "leave the head out of modules_to_save, or use low_var_kl."
            )
        self._policy, self._reference = causal, causal if reference is None else causal_model(reference)
        self._temperature, self.reader = temperature, EmittedReader()

    def between(self, hidden: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the divergence at every position (N, T), 0 where `mask` is False; with gradients of the policy.

        Args:
            hidden: (N, T', D) of the policy; T' is T, or less if the others are not in the mask.
            reference: (N, T, D).
            mask: (N, T) bool.
        """
        found = torch.zeros(mask.shape, device=hidden.device)
        mine = hidden[mask[:, : hidden.size(1)]]  # (K, D)
        heads = Head(self._policy, self.reader.output_type), Head(self._reference, self.reader.output_type)
        size = heads[0].positions_at_a_time(hidden.device)
        parts = [
            checkpoint(self._of_positions, *heads, *part, use_reentrant=False)
            for part in zip(mine.split(size), reference[mask].split(size), strict=True)
        ]
        return found.masked_scatter(mask, torch.cat(parts)) if len(mine) else found

    def _of_positions(
        self, policy: Head, reference: Head, hidden: torch.Tensor, reference_hidden: torch.Tensor
    ) -> torch.Tensor:
        logits = policy.logits(hidden).float() / self._temperature
        with torch.no_grad():
            theirs = reference.logits(reference_hidden.to(hidden.dtype)).float() / self._temperature
        return kl_penalty(logits.unsqueeze(0), theirs.unsqueeze(0), "full").squeeze(0)
