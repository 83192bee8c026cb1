"""Flash attention where there is none: its kernels as attention over one row after the other, for transformers."""

import torch
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
