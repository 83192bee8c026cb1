"""What is measured of the rollout batch at hand, from its prompts to its signals."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from vgr_trl.batch.signals import AttentionMass, RolloutSignals
from vgr_trl.signals.attention import AttentionProbe
from vgr_trl.signals.decoder import count_attention_layers
from vgr_trl.signals.generated import GenerationProbe
from vgr_trl.signals.modality import build_modality_masks
from vgr_trl.signals.reward_columns import SIGNAL_COLUMNS

MOST_KEPT = 2**29  # bytes of device memory for attention kept token by token; 3 rows of 1,024 tokens of a 7 B model
_OF_A_BATCH = ("active", "messages", "prompts", "signals", "prompt_mass", "generated_mass", "keep_rows", "maps")


@dataclass(frozen=True)
class Wanted:
    """What a rollout batch is measured for; empty tuples: nothing.

    Attributes:
        attention: names of the options and rewards that need attention mass.
        entropies: names of those that need entropies.
        dependency: names of those that need the dependency on the image.
    """

    attention: tuple[str, ...] = ()
    entropies: tuple[str, ...] = ()
    dependency: tuple[str, ...] = ()

    @property
    def scoring(self) -> bool:
        """Whether a pass over the rollout batch is needed."""
        return bool(self.attention or self.head)

    @property
    def head(self) -> bool:
        """Whether that pass has to go through the model's head, for log-probabilities or entropies."""
        return bool(self.entropies or self.dependency)


class RolloutMeasurement:
    """Keeps, while a rollout batch is made, its prompts and the signals of its completions.

    Args:
        wanted: what to measure.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        attention_source: `scoring` or `generate`, where attention is measured.
    """

    def __init__(
        self,
        wanted: Wanted,
        vision_token_ids: Sequence[int],
        special_token_ids: Sequence[int],
        attention_source: str = "scoring",
    ) -> None:
        self.wanted, self.attention_source = wanted, attention_source
        self.vision_token_ids, self.special_token_ids = tuple(vision_token_ids), tuple(special_token_ids)
        self.active = False
        self.messages: Any = None
        self.prompts: Any = None
        self.signals: Any = None
        self.prompt_mass: AttentionMass | None = None  # (L, N, 1), not there if attention is measured in generation
        self.generated_mass: AttentionMass | None = None
        self.keep_rows: tuple[int, ...] | None = None  # rows whose attention over the image is wanted token by token
        self.maps: dict[int, torch.Tensor] | None = None  # row -> (L, T, V), as `AttentionProbe.kept`

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rewards get beside those of the data."""
        return (*SIGNAL_COLUMNS, "mdi_balance_ratio") if self.wanted.attention else ()

    @property
    def needs_head(self) -> bool:
        """Whether log-probabilities or entropies of the batch at hand are used or recorded, in any process."""
        return self.wanted.head or self.keep_rows is not None

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout batch is made in this block; what was kept is dropped at its end, for what was kept before it."""
        before = {name: getattr(self, name) for name in _OF_A_BATCH}
        vars(self).update(dict.fromkeys(_OF_A_BATCH), active=True)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def generation(self, model: Any) -> Iterator[None]:
        """`model` generates the batch in this block; its attention is measured if that is where it is to be.

        Raises:
            ConfigError: as `GenerationProbe`.
        """
        wanted = self.active and self.wanted.attention and self.attention_source == "generate"
        if not wanted or self.generated_mass is not None:
            yield
            return
        ids = {"vision_token_ids": self.vision_token_ids, "special_token_ids": self.special_token_ids}
        with GenerationProbe(model, **ids) as probe:
            yield
        self.generated_mass = probe.mass

    def keep_messages(self, messages: list[Any]) -> None:
        """Keep the prompts of the batch as conversations with their images."""
        if self.active and self.messages is None:
            self.messages = messages

    def keep_prompts(self, prompts: Any) -> None:
        """Keep the prompts of the first generation of the batch; later turns are longer ones of the same rows."""
        if self.active and self.prompts is None:
            self.prompts = prompts

    def is_due(self, model: torch.nn.Module) -> bool:
        """Whether a pass of the policy `model` without gradients is the one to measure."""
        return self.active and self.wanted.scoring and self.signals is None and policy_is_active(model)

    def measure(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_length: int,
        score: Callable[[], tuple[torch.Tensor, torch.Tensor | None, Any]],
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Run `score`, which passes the batch through `model`, return what it returns, and keep the signals.

        Args:
            model: the policy.
            input_ids, attention_mask: (N, P + T).
            completion_length: T.
            score: returns log-probabilities (N, T), entropies (N, T) and anything.
        """
        mask = attention_mask[:, -completion_length:].bool()  # (N, T)
        mass = None if self.generated_mass is None else pad_to_length(self.generated_mass, completion_length)
        if self.wanted.attention and (mass is None or self.keep_rows):
            length = input_ids.size(1)
            prompts = slice(0, length - completion_length)
            masks = build_modality_masks(
                input_ids[:, prompts],
                attention_mask[:, prompts],
                vision_token_ids=self.vision_token_ids,
                special_token_ids=self.special_token_ids,
            )
            rows = slice(prompts.stop - 1, length - 1)
            kept = self._rows_that_fit(model, masks.vision, completion_length)
            with AttentionProbe(model, masks, rows, kept, measure_prompt=mass is None) as probe:
                scored = score()
            if mass is None:
                mass, self.prompt_mass = probe.mass, probe.prompt_mass
            self.maps = probe.kept
        else:
            scored = score()
        if mass is not None:
            mass.mask = mask
        logps, entropies, _ = scored
        if entropies is None:
            entropies = torch.full_like(logps, torch.nan)
        self.signals = RolloutSignals(logps.detach().float(), entropies.detach().float(), mask, mass)
        return scored

    def take_generated(self, completion_mask: torch.Tensor) -> None:
        """Keep the attention measured in generation as the signals of the batch, where no others are needed.

        Args:
            completion_mask: (N, T), 0 for tokens that do not count.
        """
        assert self.generated_mass is not None
        mask = completion_mask.bool()
        mass = pad_to_length(self.generated_mass, mask.size(1))
        mass.mask = mask
        nothing = torch.full(mask.shape, torch.nan, device=mask.device)
        self.signals = RolloutSignals(nothing, nothing, mask, mass)

    def _rows_that_fit(self, model: Any, vision: torch.Tensor, completion_length: int) -> list[int]:
        """Those of `keep_rows` whose attention, token by token, takes no more than `MOST_KEPT` bytes together."""
        fitting, used = [], 0
        layers = count_attention_layers(model)
        for row in self.keep_rows or ():
            size = 4 * layers * completion_length * int(vision[row].sum())
            if used + size <= MOST_KEPT:
                fitting.append(row)
                used += size
        return fitting


def pad_to_length(mass: AttentionMass, length: int) -> AttentionMass:
    """Return a mass of T' tokens as one of `length` tokens: those behind do not count, or are not there."""
    missing = length - mass.mask.size(1)  # the longest completion may have been cut or padded
    pad = torch.nn.functional.pad
    return AttentionMass(
        pad(mass.vision, (0, missing)),
        pad(mass.instruction, (0, missing)),
        mass.num_vision,
        mass.num_instruction,
        pad(mass.mask, (0, missing), value=False),
    )


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the adapters of `model`, if it has any, are those being trained: not switched off, not a reference."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return not module.disable_adapters and "ref" not in module.active_adapters
    return True
