"""Completions behind their prompts without padding: one row of all their tokens, where flash attention packs them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention

from vgr_trl.sharing.backbone import attention_wrapped
from vgr_trl.sharing.caches.packed_keys import packed_prefix
from vgr_trl.sharing.caches.prefix_cache import Prefix
from vgr_trl.sharing.counts import CannotShare
from vgr_trl.sharing.cut import Cut
from vgr_trl.sharing.grouping import first_rows

_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_UNTOLD = "a model that does not tell its attention where packed completions begin"


@dataclass(frozen=True)
class Packing:
    """Where the tokens of packed completions, and the keys that they see, come from.

    Attributes:
        tokens: (Q,) place of each token among the N rows of the columns behind the prompts, flattened.
        keys: (K,) place of each key among the U prompts, flattened, and the Q tokens behind these; a row's prompt,
            without its padding, is followed by the row's own tokens.
        bounds: what flash attention is told: where tokens and keys of each row begin, and the longest.
    """

    tokens: torch.Tensor
    keys: torch.Tensor
    bounds: dict[str, Any]


def why_not_pack(base: Any) -> str | None:
    """Why completions of a model cannot be packed; None if they can. Positions have to be relative.

    Args:
        base: base model.
    """
    attention = str(base.config.get_text_config(decoder=True)._attn_implementation)
    if "flash" not in attention:
        return f"{attention} attention; flash attention packs them"
    try:
        kernel = lazy_import_flash_attention(attention)[0][1]
    except (ImportError, ValueError, AttributeError) as error:
        return f"the kernel of {attention} cannot be imported: {error}"
    if kernel is None or flash_attn_supports_top_left_mask():
        return f"the kernel of {attention} does not take fewer queries than keys"
    if kinds := {type(layer).__name__ for layer in DynamicCache(config=base.config).layers} - _LAYERS:
        return f"layers of type {min(kinds)}"
    return None


def find_packing(cut: Cut, lengths: Sequence[int], mask: torch.Tensor | None, device: torch.device) -> Packing:
    """Return how the completions of a batch are packed.

    Args:
        cut: where the batch is cut.
        lengths: (N,) tokens of each row behind its prompt.
        mask: attention mask of the batch, (N, S); prompts are padded on the left. None: there is no padding.
        device: of the batch.
    """
    columns = cut.stop - cut.split
    firsts = first_rows(cut.groups)
    starts = [0] * len(firsts) if mask is None else (mask[firsts, : cut.split] == 0).sum(1).tolist()  # (U,)
    tokens, keys, written = [], [], cut.prompts * cut.split
    for row, (group, length) in enumerate(zip(cut.groups, lengths, strict=True)):
        tokens.append(torch.arange(row * columns, row * columns + length))
        keys.append(torch.arange(group * cut.split + starts[group], (group + 1) * cut.split))
        keys.append(torch.arange(written, written + length))
        written += length
    behind = [cut.split - starts[group] + length for group, length in zip(cut.groups, lengths, strict=True)]
    bounds = {
        "cu_seq_lens_q": _ends(lengths, device),
        "cu_seq_lens_k": _ends(behind, device),
        "max_length_q": max(lengths),
        "max_length_k": max(behind),
    }
    return Packing(torch.cat(tokens).to(device), torch.cat(keys).to(device), bounds)


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed_pass(
    plain: Callable[..., Any], ids: torch.Tensor, cut: Cut, packing: Packing, written: Prefix, **options: Any
) -> Any:
    """Return outputs with the last hidden states of the columns behind prompts, (N, columns, D); 0 for padding.

    Args:
        plain: forward pass of the base model.
        ids: of the batch, (N, S).
        cut: where the batch is cut.
        packing: how its completions are packed.
        written: keys and values of its prompts.
        options: of the pass, what is the same for all tokens; `position_ids`, (..., N or 1, columns), None where they
            count on from the prompts.

    Raises:
        CannotShare: the model does not tell its attention where completions begin.
    """
    ids = ids[:, cut.split : cut.stop]  # (N, columns)
    positions = options.pop("position_ids")
    if positions is None:
        positions = torch.arange(cut.split, cut.stop, device=ids.device).unsqueeze(0)
    positions = positions.expand(*positions.shape[:-2], *ids.shape).flatten(-2)  # (..., N * columns)
    cache = packed_prefix(written, packing.keys)
    with _told(packing.bounds["cu_seq_lens_k"]) as told:
        outputs = plain(
            input_ids=ids.flatten()[packing.tokens].unsqueeze(0),
            position_ids=positions[..., packing.tokens].unsqueeze(-2),
            past_key_values=cache,
            **packing.bounds,
            **options,
        )
    if len(told) != len(cache.layers):
        raise CannotShare(_UNTOLD)
    hidden = outputs.last_hidden_state[0]  # (Q, D)
    every = hidden.new_zeros(ids.numel(), hidden.size(-1)).index_copy(0, packing.tokens, hidden)
    outputs.last_hidden_state = every.unflatten(0, ids.shape)
    return outputs


@contextmanager
def _told(bounds: torch.Tensor) -> Iterator[list[None]]:
    """An entry for each attention of this block, which has to be told these bounds."""
    calls: list[None] = []

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("cu_seq_lens_k") is not bounds:
                raise CannotShare(_UNTOLD)
            calls.append(None)
            return attend(*args, **kwargs)

        return told

    with attention_wrapped(wrap):
        yield calls
