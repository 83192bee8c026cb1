"""A batch in two stages: its prompts, then its completions behind them, those of similar length at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.replacing import replaced
from vgr_trl.sharing.caches.prefix_cache import (
    Prefix,
    PromptsStored,
    check_read,
    check_written,
    ends_with_keys,
    prefix_to_read,
    prefix_to_write,
)
from vgr_trl.sharing.counts import CannotShare
from vgr_trl.sharing.cut import Cut, constants
from vgr_trl.sharing.grouping import cut_by_length, tokens_of_a_pass
from vgr_trl.sharing.packing import find_packing, packed_pass


def two_stages(
    base: Any,
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    cut: Cut,
    *,
    whole: bool,
    alike: bool,
    packs: bool = False,
) -> Any:
    """Return the outputs of a base model for all rows and columns; those of padding behind completions are 0.

    Args:
        whole: whether outputs of prompts and of padding are wanted, which are 0 otherwise.
        alike: whether all processes have to make equally many passes.
        packs: whether completions pass as one row without padding, unless outputs of padding are wanted.

    Raises:
        CannotShare: the model turns out not to keep its prompts, or not to read them.
    """
    ids = inputs["input_ids"]
    index = torch.tensor(cut.groups, device=ids.device)  # (N,)
    common = {**constants(inputs), "use_cache": False, "return_dict": True}
    common.pop("logits_to_keep", None)  # Gemma 4 would keep that many of each stage
    prefix = prefix_to_write(base.config)
    prefix.groups = cut.groups
    with _cache_through_checkpoints(base), _own_offsets(base) as offsets:
        prompts = None
        with nullcontext() if whole or alike else _ended_early(base, prefix):
            prompts = plain(**common, **cut.prompt_inputs(inputs), past_key_values=prefix)
        check_written(prefix, cut.split, None if prompts is None else _hidden(prompts))
        offsets.expand(index)
        positions = _positions(inputs, cut, offsets)
        if packs and not whole:
            packing = find_packing(cut, _lengths(inputs, cut), inputs.get("attention_mask"), ids.device)
            part = packed_pass(plain, ids, cut, packing, prefix, position_ids=positions, **common)
            hidden = part.last_hidden_state  # (N, stop - split, D)
        else:
            lengths = [cut.stop - cut.split] * len(ids) if whole or alike else _lengths(inputs, cut)
            hidden, part = _padded_passes(partial(plain, **common), inputs, cut, prefix, positions, lengths)
    if whole:
        assert prompts is not None
        hidden = torch.cat([_hidden(prompts).index_select(0, index), hidden], dim=1)
    missing = cut.stop - hidden.size(1)
    hidden = torch.nn.functional.pad(hidden, (0, 0, missing, ids.size(1) - cut.stop))
    return type(part)(last_hidden_state=hidden)  # (N, S, D)


def _padded_passes(
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    cut: Cut,
    prefix: Prefix,
    positions: torch.Tensor | None,
    lengths: list[int],
) -> tuple[torch.Tensor, Any]:
    """Completions behind the prompts, each pass as wide as its longest: hidden states, and the outputs of one pass."""
    ids = inputs["input_ids"]
    index = torch.tensor(cut.groups, device=ids.device)  # (N,)
    passes = cut_by_length(lengths, tokens_of_a_pass(ids.device.type))
    parts = []
    for rows in passes:
        behind = prefix_to_read(prefix, index if len(passes) == 1 else index[rows])
        behind.rows = None if len(passes) == 1 else rows
        stop = cut.split + max(lengths[row] for row in rows)
        part = plain(**_columns(inputs, cut, rows, stop, positions), past_key_values=behind)
        check_read(behind)
        missing = cut.stop - stop
        parts.append(torch.nn.functional.pad(_hidden(part), (0, 0, 0, missing)))
    return parts[0] if len(passes) == 1 else torch.cat(parts)[_places(passes)], part


def _hidden(outputs: Any) -> torch.Tensor:
    if not hasattr(outputs, "last_hidden_state"):
        raise CannotShare("a model that does not return its last hidden states")
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


def _lengths(inputs: dict[str, Any], cut: Cut) -> list[int]:
    """Columns from `split` on that emit a token of each row, at least one."""
    if inputs.get("attention_mask") is None:
        return [cut.stop - cut.split] * len(cut.groups)
    emitted = inputs["attention_mask"][:, cut.split + 1 : cut.stop + 1].bool().sum(1)  # (N,)
    lengths: list[int] = emitted.clamp(min=1).tolist()
    return lengths


def _columns(
    inputs: dict[str, Any], cut: Cut, rows: list[int], stop: int, positions: torch.Tensor | None
) -> dict[str, Any]:
    """Inputs of the second stage, of some rows and of columns [split, stop)."""
    mask = inputs.get("attention_mask")
    if positions is not None:
        of_each = positions.size(-2) == len(cut.groups)
        positions = (positions[..., rows, :] if of_each else positions)[..., : stop - cut.split]
    return {
        "input_ids": inputs["input_ids"][rows, cut.split : stop],
        "attention_mask": None if mask is None else mask[rows, :stop],
        "position_ids": positions,
    }


def _places(passes: list[list[int]]) -> list[int]:
    """Where the rows of a batch stand among those of its passes."""
    order = [row for rows in passes for row in rows]
    return sorted(range(len(order)), key=order.__getitem__)


class _Offsets:
    """What a Qwen-VL model adds to the positions of the tokens behind its images; nothing for other models."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.exist = hasattr(base, "rope_deltas")
        self.per_row: torch.Tensor | None = None  # (N, 1)

    def expand(self, index: torch.Tensor) -> None:
        """Take over what the pass over the prompts has found, for rows whose prompts are `index`."""
        if self.exist and self.base.rope_deltas is not None:
            self.per_row = self.base.rope_deltas.index_select(0, index.to(self.base.rope_deltas.device))


@contextmanager
def _own_offsets(base: Any) -> Iterator[_Offsets]:
    """Make the model find its offsets anew, and leave it with those of all rows, as a plain pass does."""
    offsets = _Offsets(base)
    before = getattr(base, "rope_deltas", None)
    if offsets.exist:
        base.rope_deltas = None
    try:
        yield offsets
    except BaseException:
        offsets.per_row = None
        raise
    finally:
        if offsets.exist:
            base.rope_deltas = before if offsets.per_row is None else offsets.per_row


def _positions(inputs: dict[str, Any], cut: Cut, offsets: _Offsets) -> torch.Tensor | None:
    """Position ids of the second stage; None where the model counts on from its cache, as in its plain pass."""
    given: torch.Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given[..., cut.split : cut.stop]
    if not offsets.exist:
        return None
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if offsets.per_row is None:  # the plain pass of these models does not skip padding unless there are images
        return torch.arange(cut.split, cut.stop, device=ids.device).expand(len(ids), -1)  # (N, T)
    mask = torch.ones_like(ids) if mask is None else mask
    positions = mask.long().cumsum(-1)[:, cut.split : cut.stop] - 1 + offsets.per_row.to(ids.device)
    return positions.expand(3, -1, -1)  # (3, N, T): time, height, width


@contextmanager
def _ended_early(base: torch.nn.Module, prefix: Prefix) -> Iterator[None]:
    """End a pass over prompts where the last layer has stored its keys and values, unless a hook waits for its outputs.

    Queries, attention and what comes behind them serve no completion. The layer is not computed again in the backward
    pass, which a checkpoint that has been left cannot do.
    """
    last = [name for name, layer in _checkpoints(base).items() if _has_number(layer, len(prefix.layers) - 1)]
    if len(last) != 1 or not ends_with_keys(prefix) or _has_hooks(base, last[0]):
        yield
        return
    prefix.layers[-1].ends_pass = True
    with suppress(PromptsStored), replaced(base.get_submodule(last[0]), "gradient_checkpointing", False):
        yield


def _checkpoints(base: torch.nn.Module) -> dict[str, Any]:
    """Layers by name."""
    return {name: module for name, module in base.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def _has_number(layer: torch.nn.Module, number: int) -> bool:
    return any(getattr(module, "layer_idx", None) == number for module in layer.modules())


def _has_hooks(base: torch.nn.Module, name: str) -> bool:
    """Whether a hook waits for the outputs of a module, of one within it or of one around it."""
    return any(
        module._forward_hooks or hasattr(module, "_hf_hook")
        for other, module in base.named_modules()
        if f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}." if other else "")
    )


@contextmanager
def _cache_through_checkpoints(base: torch.nn.Module) -> Iterator[None]:
    """Let checkpointed layers use a cache: ours is not changed by a recomputation."""
    with ExitStack() as stack:
        for layer in _checkpoints(base).values():
            stack.enter_context(replaced(layer, "_can_checkpoint_with_cache", True))
        yield
