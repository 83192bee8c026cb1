"""Flash attention where there is none: its kernels as attention over one row after the other, for transformers."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import modeling_flash_attention_utils as flash


def with_kernels(monkeypatch):
    """Let transformers import these kernels; return the packed calls of them, queries and keys of every row."""
    packed = []

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
               window_size=(-1, -1), dropout_p=0.0):  # fmt: skip
        lengths = [bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)]
        assert [max(each) for each in lengths] == [max_seqlen_q, max_seqlen_k]
        assert [sum(each) for each in lengths] == [len(q), len(k)]
        assert (causal, dropout_p) == (True, 0.0)
        packed.append(tuple(lengths))
        rows = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        return torch.cat([_attend(*row, softmax_scale, window_size[0]) for row in rows])

    def dense(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), dropout_p=0.0):
        assert causal
        return torch.stack([_attend(*row, softmax_scale, window_size[0]) for row in zip(q, k, v, strict=True)])

    def kernels(*args, **kwargs):
        return dense, varlen, None, flash._pad_input, flash._unpad_input

    monkeypatch.setattr(flash, "_lazy_imports", kernels)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    return packed


def _attend(query, key, value, scale, window):
    """(Q, H, D), (K, H', D), (K, H', D) -> (Q, H, D); the last query belongs to the last key."""
    assert query.size(-1) == key.size(-1) == value.size(-1)
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    places = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
    seen = torch.arange(len(key)) <= places
    if window >= 0:
        seen &= torch.arange(len(key)) >= places - window
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def as_flash(model):
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config._attn_implementation_internal = "flash_attention_2"
    return model


class PaddedKernel:
    """What `attention._Kernel` does, by PyTorch's flash attention on a CPU over padded parts."""

    def __init__(self, scaling):
        self.scaling = scaling

    def forward(self, query, key, value, bounds, *, causal):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        padded, mask = self._pad(query, key, value, bounds, causal)
        outputs, lse = attend(*padded, 0.0, False, attn_mask=mask, scale=self.scaling)
        is_query = self._is_token(bounds.cu_seq_lens_q)
        return outputs.transpose(1, 2)[is_query], lse.transpose(1, 2)[is_query].T

    def backward(
        self, grad, query, key, value, outputs, lse, bounds, *, causal
    ):  # fmt: skip
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        padded, mask = self._pad(query, key, value, bounds, causal)
        queries, keys = (self._is_token(ends) for ends in bounds[:2])
        given, made = (self._split(each, bounds.cu_seq_lens_q) for each in (grad, outputs))
        sums = self._split(lse.T.unsqueeze(-1), bounds.cu_seq_lens_q).squeeze(-1)
        grads = differentiate(given, *padded, made, sums, 0.0, False, attn_mask=mask, scale=self.scaling)
        of_query, *others = (each.transpose(1, 2) for each in grads)
        of_key, of_value = (each.unflatten(2, (key.size(1), -1)).sum(3)[keys] for each in others)
        return of_query[queries], of_key, of_value

    def _pad(self, query, key, value, bounds, causal):
        heads = query.size(1) // key.size(1)
        parts = [(query, bounds.cu_seq_lens_q)]
        parts += [(each.repeat_interleave(heads, 1), bounds.cu_seq_lens_k) for each in (key, value)]
        padded = tuple(self._split(*part) for part in parts)  # (rows, H, longest, D) each
        is_key = self._is_token(bounds.cu_seq_lens_k)[:, None, None]
        mask = is_key.expand(-1, 1, padded[0].size(2), -1)
        mask = mask.tril() if causal else mask
        return padded, torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)

    @staticmethod
    def _split(tokens, ends):
        return pad_sequence(list(tokens.split(ends.diff().tolist())), batch_first=True).transpose(1, 2)

    @staticmethod
    def _is_token(ends):
        lengths = ends.diff()
        return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
