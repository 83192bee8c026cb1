"""What is measured of a rollout batch, while it is generated and when it is scored."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from vgr_trl.batch.signals import AttentionMass, RolloutSignals, unmeasured
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.signals.attention.generated import GenerationProbe
from vgr_trl.signals.attention.probe import AttentionProbe
from vgr_trl.signals.decoder import count_attention_layers
from vgr_trl.signals.modality import ModalityMasks, build_modality_masks
from vgr_trl.signals.named import NamedSignal
from vgr_trl.signals.ratios import late_layers
from vgr_trl.signals.reward_columns import SIGNAL_COLUMNS
from vgr_trl.signals.similarity import SimilarityProbe

MOST_KEPT = 2**29  # bytes of device memory for attention kept token by token; 10 rows of 1,024 tokens of a 7 B model
Scored = tuple[torch.Tensor, torch.Tensor | None, Any]


@dataclass(frozen=True)
class Wanted:
    """What a rollout batch is measured for: per measurement, the names of the options, rewards and rules that read it.

    `shift` is how distributions differ under the perturbation, `views` log-probabilities under perturbations, `regions`
    attention on what the question is about, which implies `attention`, `values` a pass, whatever it is for.
    """

    attention: tuple[str, ...] = ()
    entropies: tuple[str, ...] = ()
    dependency: tuple[str, ...] = ()
    logps: tuple[str, ...] = ()
    similarity: tuple[str, ...] = ()
    shift: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def scoring(self) -> bool:
        """Whether a pass over the rollout batch is needed."""
        return bool(self.attention or self.similarity or self.head or self.values)

    @property
    def head(self) -> bool:
        """Whether that pass has to go through the model's head, for log-probabilities or entropies."""
        return bool(self.entropies or self.dependency or self.shift or self.logps)


@dataclass(frozen=True)
class Measured:
    """What one pass over a rollout batch has measured.

    Attributes:
        signals: of the completions.
        prompt_mass: attention of the prompt's own instruction tokens, (L, N, 1); None if attention was measured in
            generation, or not at all.
        maps: row -> attention over its vision tokens, (layers that rewards read, T, V), of the rows whose maps were
            wanted.
    """

    signals: RolloutSignals
    prompt_mass: AttentionMass | None = None
    maps: dict[int, torch.Tensor] | None = None


@dataclass(frozen=True)
class Measurement:
    """What is measured of every rollout batch, and how.

    Attributes:
        wanted: what to measure.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        attention_source: `scoring` or `generate`, where attention is measured.
        attention_segments: how layers are cut into segments.
        similarity_layer, similarity_over: as `SimilarityProbe` takes them.
        views: perturbations under which completions are scored.
        named: signals that are asked for by name, or read by plug-ins.
        blind: whether rewards get blind answers.
    """

    wanted: Wanted
    vision_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    attention_source: str = "scoring"
    attention_segments: str = "thirds"
    similarity_layer: int = -1
    similarity_over: str = "max"
    views: tuple[str, ...] = ()
    named: tuple[NamedSignal, ...] = ()
    blind: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rewards get beside those of the data."""
        of_attention = (*SIGNAL_COLUMNS, "mdi_balance_ratio") if self.wanted.attention else ()
        answers = (BLIND_ANSWERS,) if self.blind else ()
        return (*of_attention, *answers, *(signal.name for signal in self.named if not signal.is_late))

    @property
    def reads_pass(self) -> bool:
        """Whether the scoring pass is needed for what neither the head nor a generation gives."""
        return bool(self.wanted.values or self.wanted.similarity)

    @property
    def in_generation(self) -> bool:
        """Whether attention is measured while generating."""
        return bool(self.wanted.attention) and self.attention_source == "generate"

    def generation_probe(self, model: nn.Module) -> GenerationProbe:
        """Return a context in which `model` generates a batch, whose attention it then has as `mass`.

        Raises:
            ConfigError: as `GenerationProbe`.
        """
        return GenerationProbe(model, vision_token_ids=self.vision_token_ids, special_token_ids=self.special_token_ids)

    def measure(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_length: int,
        score: Callable[[], Scored],
        *,
        generated_mass: AttentionMass | None = None,
        rows_with_maps: Sequence[int] = (),
        region: torch.Tensor | None = None,
    ) -> tuple[Scored, Measured]:
        """Run `score`, which passes the batch through `model`; return what it returns, and what was measured.

        Args:
            input_ids, attention_mask: (N, P + T).
            completion_length: T.
            score: returns log-probabilities (N, T), entropies (N, T) and anything.
            generated_mass: attention measured in generation, which then is not measured again.
            rows_with_maps: rows whose attention over the image is wanted token by token.
            region: (N, P) bool, vision tokens whose attention is wanted apart.
        """
        mask = attention_mask[:, -completion_length:].bool()  # (N, T)
        mass = None if generated_mass is None else pad_to_length(generated_mass, completion_length)
        prompt_mass, maps, probe, similar = None, None, None, None
        with ExitStack() as stack:
            if self.wanted.attention and (mass is None or rows_with_maps):
                length = input_ids.size(1)
                masks = self._masks(input_ids, attention_mask, completion_length)
                masks.region = None if region is None else region.to(input_ids.device)
                rows = slice(length - completion_length - 1, length - 1)
                late = late_layers(count_attention_layers(model), self.attention_segments)
                kept = _rows_that_fit(masks.vision, completion_length * len(late), rows_with_maps)
                probe = AttentionProbe(model, masks, rows, kept, measure_prompt=mass is None, keep_layers=late)
                stack.enter_context(probe)
            if self.wanted.similarity:
                vision = self._masks(input_ids, attention_mask, completion_length).vision
                similar = SimilarityProbe(model, vision, self.similarity_layer, self.similarity_over)
                stack.enter_context(similar)
            scored = score()
        if probe is not None:
            if mass is None:
                mass, prompt_mass = probe.mass, probe.prompt_mass
            maps = probe.kept
        if mass is not None:
            mass.mask = mask
        logps, entropies, _ = scored
        if entropies is None:
            entropies = torch.full_like(logps, torch.nan)
        signals = RolloutSignals(logps.detach().float(), entropies.detach().float(), mask, mass)
        if similar is not None:
            signals.similarity = similar.similarity
        return scored, Measured(signals, prompt_mass, maps)

    def _masks(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> ModalityMasks:
        """Of the prompts, (N, P)."""
        return build_modality_masks(
            input_ids[:, :-completion_length],
            attention_mask[:, :-completion_length],
            vision_token_ids=self.vision_token_ids,
            special_token_ids=self.special_token_ids,
        )


def signals_of_generation(mass: AttentionMass, completion_mask: torch.Tensor) -> RolloutSignals:
    """Return attention measured in generation as the signals of a batch, where no others are needed."""
    mask = completion_mask.bool()
    mass = pad_to_length(mass, mask.size(1))
    mass.mask = mask
    return replace(unmeasured(mask), attention=mass)


def _rows_that_fit(vision: torch.Tensor, queries: int, rows: Sequence[int]) -> list[int]:
    """Those of `rows` whose attention, token by token, takes no more than `MOST_KEPT` bytes together.

    Args:
        vision: (N, P) bool, vision tokens of the prompts.
        queries: of a row, those of every layer counted.
    """
    fitting, used = [], 0
    for row in rows:
        size = 4 * queries * int(vision[row].sum())
        if used + size <= MOST_KEPT:
            fitting.append(row)
            used += size
    return fitting


def pad_to_length(mass: AttentionMass, length: int) -> AttentionMass:
    """Return a mass of T' tokens as one of `length` tokens: those behind do not count, or are not there."""
    missing = length - mass.mask.size(1)  # the longest completion may have been cut or padded
    names = [name for name in ("vision", "instruction", "region", "mask") if getattr(mass, name) is not None]
    padded: Any = {name: torch.nn.functional.pad(getattr(mass, name), (0, missing)) for name in names}
    return replace(mass, **padded)


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the adapters of `model`, if it has any, are those being trained: not switched off, not a reference."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module.has_active_enabled_adapter and "ref" not in module.active_adapters
    return True
