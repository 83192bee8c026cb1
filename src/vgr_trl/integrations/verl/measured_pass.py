"""Attention measured in a pass of verl or EasyR1, whose rows may be packed into one, as columns along its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.batch.signals import AttentionMass
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.integrations.verl.token_weights import LAST_LAYERS
from vgr_trl.sharing import SharingReport, share_prompts
from vgr_trl.sharing.backbone import causal_model, flattens_layers
from vgr_trl.signals.attention.probe import AttentionProbe
from vgr_trl.signals.modality import ModalityMasks, build_modality_masks, vision_token_ids
from vgr_trl.signals.ratios import last_layers, late_layers


@dataclass(frozen=True)
class Layout:
    """How the N sequences of a micro-batch pass through the model.

    Attributes:
        input_ids: (N, S), or packed (1, tokens of all rows).
        present: the same shape, bool, which of them are no padding.
        prompt: the same shape, bool, which belong to prompts.
        rows: the same shape, int64, the sequence that each belongs to.
        count: N.
        packed: whether the sequences stand behind each other in one row.
    """

    input_ids: torch.Tensor
    present: torch.Tensor
    prompt: torch.Tensor
    rows: torch.Tensor
    count: int
    packed: bool


def packed_layout(tokens: torch.Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int], pad: int = 0) -> Layout:
    """Return the layout of sequences behind each other.

    Args:
        tokens: (tokens of all sequences,).
        lengths: of the N sequences.
        prompt_lengths: of their prompts.
        pad: tokens that are appended behind all.
    """
    sizes = torch.tensor([*lengths, pad])
    rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)  # (tokens + pad,)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])[:-1]
    prompts = torch.tensor([*prompt_lengths, 0])
    prompt = torch.arange(len(rows)) - starts[rows] < prompts[rows]
    ids = torch.nn.functional.pad(tokens, (0, pad))
    device = tokens.device
    present = (rows < len(lengths)).to(device)
    rows = rows.clamp(max=len(lengths) - 1).to(device)
    return Layout(ids[None], present[None], (prompt.to(device) & present)[None], rows[None], len(lengths), True)


def padded_layout(input_ids: torch.Tensor, present: torch.Tensor, prompt: torch.Tensor) -> Layout:
    """Return the layout of one sequence per row; all arguments (N, S)."""
    rows = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1).expand_as(input_ids)
    return Layout(input_ids, present.bool(), prompt.bool() & present.bool(), rows, len(input_ids), False)


class MeasuredPass:
    """Measures, while it is active, one pass of a micro-batch; `columns` is what came out.

    Args:
        model: of the actor, also wrapped by FSDP.
        special_token_ids: tokens that belong to no modality.
        agree: as `share_prompts` takes it.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        options: SignalOptions,
        special_token_ids: Sequence[int],
        agree: Any = None,
    ) -> None:
        vision = tuple(options.vision_token_ids or ()) or vision_token_ids(causal_model(model))
        if not vision:
            raise ConfigError(
                f"{type(causal_model(model)).__name__} has no image token in its configuration: give vision_token_ids."
            )
        self.model, self.layout, self.options, self.agree = model, layout, options, agree
        masks = build_modality_masks(
            layout.input_ids, layout.prompt, vision_token_ids=vision, special_token_ids=special_token_ids
        )
        self.masks = ModalityMasks(masks.vision, masks.instruction)
        self.report: SharingReport | None = None
        self.columns: dict[str, torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator["MeasuredPass"]:
        """Measure the pass that is made in the block."""
        first, stop = self._emitting()
        probe = AttentionProbe(self.model, self.masks, slice(first, stop), packed=self.layout.packed)
        with ExitStack() as stack:
            apart = not self.layout.packed and not flattens_layers(self.model)  # FSDP 1 has not been tried
            if self.options.share_prompts != "off" and apart:
                self.report = stack.enter_context(share_prompts(self.model, agree=self.agree))
            with probe:
                yield self
        self.columns = self._columns(probe.mass, first, stop)

    def _emitting(self) -> tuple[int, int]:
        """Positions from the first to behind the last that emits a token of a response."""
        response = self.layout.present & ~self.layout.prompt
        places = response.any(0).nonzero().flatten()
        if not len(places):
            return 0, 1
        return max(int(places[0]) - 1, 0), max(int(places[-1]), 1)

    def _columns(self, mass: AttentionMass, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Per token of the layout: attention per vision and per instruction token of its own prompt, and their ratio.

        What stands at a position belongs to the token that it emits, which is the next one.
        """
        options, layout = self.options, self.layout
        late = late_layers(len(mass.vision), options.attention_segments)
        columns = {}
        sides = {
            "vgr_vision": (mass.vision, self.masks.vision),
            "vgr_instruction": (mass.instruction, self.masks.instruction),
        }
        for name, (side, mask) in sides.items():
            counts = torch.zeros(layout.count, device=mask.device)
            counts = counts.index_add(0, layout.rows.flatten(), mask.flatten().float())  # (N,)
            of_token = counts[layout.rows[:, first:stop]].masked_fill(
                counts[layout.rows[:, first:stop]] == 0, torch.nan
            )
            columns[name] = self._along(side[late].mean(0) / of_token, first, stop)
            if options.token_weights and options.token_weights_last_k_layers is not None:
                chosen = last_layers(len(side), options.token_weights_last_k_layers, "thirds", LAST_LAYERS)
                columns[f"{name}_chosen"] = self._along(side[chosen].mean(0) / of_token, first, stop)
        if "vgr_vision_chosen" in columns:
            columns["vgr_token"] = columns.pop("vgr_instruction_chosen") / columns.pop("vgr_vision_chosen")
        return columns

    def _along(self, values: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        columns = self.layout.input_ids.size(1)
        return torch.nn.functional.pad(values, (first, columns - stop), value=torch.nan)
