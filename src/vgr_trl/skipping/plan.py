"""What a run leaves out of its training passes, what it does not, and why."""

from dataclasses import dataclass
from typing import Any

from vgr_trl.sharing.counts import CannotShare
from vgr_trl.sharing.fitness import refuse_bidirectional_attention
from vgr_trl.sharing.plan import Place

# Layers and rotary embeddings to which only the distance of two tokens matters.
_RELATIVE_LAYERS = {"full_attention", "sliding_attention"}
_RELATIVE_ROPE = {"default", "linear", "llama3", "yarn"}
_ABSOLUTE_SCALES = ("llama_4_scaling_beta", "attn_temperature_tuning")


@dataclass(frozen=True)
class SkippingPlan:
    """What the options of `SkipOptions` come to in a run; printed as the one line that says so.

    Attributes:
        rows: completions without an advantage.
        tokens: tokens without one.
        padding: columns that are padding in all rows, or behind the last live token.
        head: whether the head scores live tokens only.
        packing: padding between completions of unequal length that pass behind shared prompts.
        dealing: rows dealt to micro-batches by length.
        old_logps: old log-probabilities taken from the first training pass.
        images: whether images have to run in every pass that is given some, read or not.
        window: rows of this process that change places with each other: those of a rollout within an optimizer step.
    """

    rows: Place
    tokens: Place
    padding: Place
    packing: Place
    head: bool
    dealing: Place
    old_logps: Place
    images: bool
    window: int

    def __str__(self) -> str:
        return (
            f"skip_dead_rows: {self.rows}; skip_dead_tokens: {self.tokens}; skip_padding: {self.padding}; "
            f"pack_completions: {self.packing}; deal_by_length: {self.dealing}; reuse_first_pass: {self.old_logps}"
        )


def why_padding_counts(base: Any) -> str | None:
    """Why a model gives other results for a batch with less padding, or fewer columns; None if it does not."""
    config = base.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    types = {options.get("rope_type", "default") for options in nested} if rope else {"absolute"}
    layers = set(getattr(config, "layer_types", None) or ())
    scaled = any(getattr(config, name, None) or any(name in options for options in nested) for name in _ABSOLUTE_SCALES)
    if unknown := types - _RELATIVE_ROPE:
        return f"positions of type {min(unknown)} count it"
    if unknown := layers - _RELATIVE_LAYERS:
        return f"layers of type {min(unknown)} may read it"
    if scaled:
        return "attention is scaled by the position, which counts it"
    try:
        refuse_bidirectional_attention(base)
    except CannotShare as error:
        return str(error)
    return None
