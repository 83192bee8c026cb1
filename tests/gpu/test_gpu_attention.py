"""Packed rows, by kernels of attention that only a GPU has."""

import pytest
import torch
from gpu import flash
from places import to
from support.models.compare import with_head
from support.models.families import build, make_batch
from test_gpu_sharing import FACTOR, all_gradients, distance, exact
from transformers import modeling_flash_attention_utils

from vgr_trl.sharing import share_prompts

pytestmark = pytest.mark.gpu


def test_packed(monkeypatch, measured):
    """Gradients by one row without padding are as near to float32 as those of plain passes."""
    for name in ("_lazy_imports", "_loaded_implementation"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, getattr(modeling_flash_attention_utils, name))
    reference = exact(all_gradients, "qwen2_5_vl")
    model = with_head(build("qwen2_5_vl").to("cuda", torch.bfloat16))
    batch = to(make_batch("qwen2_5_vl"), "cuda", torch.bfloat16)
    measured["plain"] = distance(all_gradients(model, batch), reference)
    flash.install()
    flash.attend_with(model, "flash_attention_2")
    with share_prompts(model, batch.completion_length, packs=True) as report:
        measured["packed"] = distance(all_gradients(model, batch), reference)
    assert not report.plain
    assert measured["packed"] < FACTOR * measured["plain"] + 1e-4
