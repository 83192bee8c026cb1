"""Attention of a row by flash kernels that return the logsumexp, without a copy of a prompt's keys for its completions.

Prompts attend to themselves; completions attend to their prompt and to themselves, and the two outputs are merged:
o = Σ exp(lᵢ − l) oᵢ, l = log Σ exp(lᵢ), with lᵢ the logsumexp of each set of keys. The backward pass of each set takes
the merged o and l, as in ring attention (arXiv 2310.01889).
"""

from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from vgr_trl.sharing.row import Bounds, Row, Visibility

_HAS_VARIABLE_LENGTHS = Version(torch.__version__).release >= (2, 10)  # as `torch.nn.attention.varlen` calls the kernel
_WIDEST_HEAD = 256


def can_merge(query: Tensor, seen: Visibility) -> bool:
    """Whether the kernels take such queries, (1, H, L, D): 16 bits on a GPU, each token seeing all earlier ones."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    fits = dtype in (torch.bfloat16, torch.float16) and query.size(-1) % 8 == 0 and query.size(-1) <= _WIDEST_HEAD
    return device == "cuda" and _HAS_VARIABLE_LENGTHS and fits and seen == Visibility()


def attend_merged(query: Tensor, key: Tensor, value: Tensor, row: Row, scaling: float | None) -> Tensor:
    """Compute the attention of a row whose tokens see all earlier ones, (1, L, H, D).

    Args:
        query: (1, H, L, D).
        key: (1, key heads, L, D).
        value: (1, key heads, L, D).
        row: layout, in which the completions of a prompt stand together.
        scaling: softmax scale, 1 / sqrt(D) by default.
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    tokens = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))  # (L, heads, D)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    outputs: Tensor = _Merged.apply(*tokens, row, scaling)
    return outputs.unsqueeze(0)


class _Merged(torch.autograd.Function):
    """Three calls of the kernel: prompts, completions over their prompts, completions over themselves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: Row, scaling: float) -> Tensor:
        kernel, first = _Kernel(scaling), row.first
        (prompts, own), (keys, own_keys), (values, own_values) = (
            (each[:first], each[first:]) for each in (query, key, value)
        )
        before, lse_before = kernel.forward(prompts, keys, values, row.prompt_bounds, causal=True)
        over, lse_over = kernel.forward(own, keys, values, row.bounds_over_prompts, causal=False)
        itself, lse_itself = kernel.forward(own, own_keys, own_values, row.bounds_over_themselves, causal=True)
        lse = torch.logaddexp(lse_over, lse_itself)  # (H, completions' tokens)
        share = (lse_over - lse).exp().T.unsqueeze(-1)  # (completions' tokens, H, 1)
        behind = torch.lerp(itself.to(lse.dtype), over.to(lse.dtype), share).to(query.dtype)
        outputs = torch.cat([before, behind])
        ctx.save_for_backward(query, key, value, outputs, lse_before, lse)
        ctx.row, ctx.kernel = row, kernel
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, outputs, lse_before, lse = ctx.saved_tensors
        row, kernel, first = ctx.row, ctx.kernel, ctx.row.first
        before, behind = slice(first), slice(first, None)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

        def run(queries: slice, keys: slice, lse: Tensor, bounds: Bounds, causal: bool) -> tuple[Tensor, ...]:
            of_queries = grad[queries].contiguous(), query[queries], key[keys], value[keys], outputs[queries], lse
            found: tuple[Tensor, ...] = kernel.backward(*of_queries, bounds, causal=causal)
            return found

        of_prompts = run(before, before, lse_before, row.prompt_bounds, True)
        over = run(behind, before, lse, row.bounds_over_prompts, False)
        itself = run(behind, behind, lse, row.bounds_over_themselves, True)
        grads[0][before] = of_prompts[0]
        torch.add(over[0], itself[0], out=grads[0][behind])
        for grad_of, one, other, own in zip(grads[1:], of_prompts[1:], over[1:], itself[1:], strict=True):
            torch.add(one, other, out=grad_of[before])
            grad_of[behind] = own
        return (*grads, None, None)


class _Kernel:
    """PyTorch's flash attention with variable lengths, on a GPU."""

    def __init__(self, scaling: float) -> None:
        self.scaling = scaling

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return outputs (tokens, H, D) and logsumexp (H, tokens)."""
        attend = torch.ops.aten._flash_attention_forward
        outputs, lse, self.random, *_ = attend(query, key, value, *bounds, 0.0, causal, False, scale=self.scaling)
        return outputs, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, outputs: Tensor, lse: Tensor, bounds: Bounds, *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of queries, keys and values."""
        unused = torch.empty(0, device=query.device)
        given = grad, query, key, value, outputs, lse.contiguous(), *bounds, 0.0, causal, self.random, unused
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(*given, scale=self.scaling)
        return grads
