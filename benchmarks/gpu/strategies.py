"""Attention of G completions behind one prompt, computed in four ways from the same queries, keys and values.

All take and give rows of one sequence [prompt, c1, ..., cG], (H, P + G * T, D), with fewer heads in keys and values.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gpu import flash
from vgr_trl.sharing.attention import attend_by_sdpa

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Strategy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make(name: str, prompt: int, completion: int, generations: int, device: str) -> Strategy:
    """The strategy called `name`, with what it needs beside the tensors made beforehand, as a model does per batch."""
    if name == "reference":
        dense = dense_mask(prompt, completion, generations, device)
        return lambda query, key, value: reference(query, key, value, dense)
    if name == "packed":
        mask = block_mask(prompt, completion, generations, device)
        return lambda query, key, value: packed(query, key, value, mask)
    if name == "paths":
        lengths = path_lengths(prompt, completion, generations, device)
        return lambda query, key, value: paths(query, key, value, prompt, completion, lengths)
    mask = _mask(name, prompt, completion, device)
    return lambda query, key, value: two_stages(query, key, value, prompt, completion, mask)


def reference(query: Any, key: Any, value: Any, mask: torch.Tensor) -> torch.Tensor:
    """One row and a matrix of what it sees."""
    key, value = repeated(query, key, value)
    return scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]


def two_stages(query: Any, key: Any, value: Any, prompt: int, completion: int, mask: Any) -> torch.Tensor:
    """The prompt alone, then all completions behind copies of its keys and values."""
    first = scaled_dot_product_attention(
        query[None, :, :prompt], key[None, :, :prompt], value[None, :, :prompt], is_causal=True, enable_gqa=True
    )
    queries, keys, values = (_by_completion(one[:, prompt:], completion) for one in (query, key, value))
    index = torch.zeros(len(queries), dtype=torch.long, device=query.device)
    keys, values = (
        torch.cat([one[None, :, :prompt].index_select(0, index), new], dim=2)
        for one, new in ((key, keys), (value, values))
    )
    if isinstance(mask, CausalBias):
        keys, values = repeated(query, keys, values, heads=1)
        second = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)  # (G, H, T, D)
    else:
        module = SimpleNamespace(num_key_value_groups=len(query) // len(key))
        second = attend_by_sdpa(module, queries, keys, values, mask)[0].transpose(1, 2)
    return torch.cat([first[0], second.transpose(0, 1).flatten(1, 2)], dim=1)


def repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int = 0) -> tuple[Any, Any]:
    """Keys and values once for each head of the query, (H, S, D), whose heads are dimension `heads` of the others."""
    times = len(query) // key.size(heads)
    return key.repeat_interleave(times, heads), value.repeat_interleave(times, heads)


def _by_completion(rows: torch.Tensor, completion: int) -> torch.Tensor:
    """(H, G * T, D) -> (G, H, T, D)."""
    return rows.unflatten(1, (-1, completion)).transpose(0, 1)


def _mask(name: str, prompt: int, completion: int, device: str) -> Any:
    """As transformers gives it where a query is not at the end of the keys; or the same as a property of the kernel."""
    if name == "two stages, no mask":
        return causal_lower_right(completion, prompt + completion)
    columns = torch.arange(prompt + completion, device=device)
    return (columns <= columns[prompt:, None])[None, None]  # (1, 1, T, P + T)


def packed(query: Any, key: Any, value: Any, mask: BlockMask) -> torch.Tensor:
    """One row; completions do not see each other."""
    run = _compiled_flex() if query.is_cuda else flex_attention
    if len(query) & (len(query) - 1):  # as transformers does where the heads are no power of two
        key, value = repeated(query, key, value)
    return run(query[None], key[None], value[None], block_mask=mask, enable_gqa=True)[0]


@cache
def _compiled_flex() -> Any:
    """Compiled once for all shapes."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(prompt: int, completion: int, generations: int, device: str) -> BlockMask:
    """What a token of the packed row sees: the prompt, and what comes before it in its own completion."""
    length, number = prompt + generations * completion, path_numbers(prompt, completion, generations, device)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & ((number[key] == 0) | (number[key] == number[query]))

    return create_block_mask(sees, None, None, length, length, device=device)


def dense_mask(prompt: int, completion: int, generations: int, device: str) -> torch.Tensor:
    """The same as a matrix; (S, S) bool."""
    number = path_numbers(prompt, completion, generations, device)
    return ((number == 0) | (number == number[:, None])).tril()


def path_numbers(prompt: int, completion: int, generations: int, device: str) -> torch.Tensor:
    """0 for the prompt's tokens, 1 to G for those of the completions; (S,)."""
    numbers = [0] * prompt + [one for one in range(1, generations + 1) for _ in range(completion)]
    return torch.tensor(numbers, device=device)


def path_lengths(prompt: int, completion: int, generations: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the prompt's and every completion's queries, and of the keys that each of them sees; (G + 2,) int32."""
    queries = torch.tensor([0, prompt] + [completion] * generations)
    keys = torch.tensor([0, prompt] + [prompt + completion] * generations)
    ends = (one.cumsum(0).to(device, torch.int32) for one in (queries, keys))
    return next(ends), next(ends)


def paths(
    query: Any, key: Any, value: Any, prompt: int, completion: int, ends: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Keys and values gathered per path from the root, then one call of variable-length flash attention."""
    generations = (query.size(1) - prompt) // completion
    before = torch.arange(prompt, device=query.device)
    own = prompt + torch.arange(generations * completion, device=query.device).view(generations, completion)
    index = torch.cat([before, *(torch.cat([before, own[one]]) for one in range(generations))])
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))  # (S, H, D)
    key, value = key.index_select(0, index), value.index_select(0, index)
    longest = (max(prompt, completion), prompt + completion)
    return flash.variable(query, key, value, *ends, *longest, causal=True).transpose(0, 1)
