"""Which rows share a prompt, where a batch is split, which rows are trained together: without a model."""

import pytest
import torch
from support.models.families import IMAGE, build

from vgr_trl.sharing.prefix_cache import UnsupportedModel
from vgr_trl.sharing.prefix_forward import check_inputs, find_split

CONFIG = build("qwen2_5_vl").config


def two_rows():
    """Two completions of two tokens behind a prompt of four."""
    ids = torch.tensor([[10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}


def test_inputs_that_cannot_be_split():
    """Images at the end of the prompt and behind, padding behind the first token, and outputs that are lacking."""
    changes = {"input_ids": (IMAGE, (3, 5)), "mm_token_type_ids": (1, (3, 5)), "attention_mask": (0, (2, 3))}
    for name, column in [(name, column) for name, (_, columns) in changes.items() for column in columns]:
        inputs = two_rows()
        inputs[name][:, column] = changes[name][0]
        with pytest.raises(UnsupportedModel):
            find_split(inputs, CONFIG, (3, 5))
    for asked in ({"return_dict": False}, {"output_attentions": True}):
        with pytest.raises(UnsupportedModel, match=next(iter(asked))):
            check_inputs({**two_rows(), **asked}, CONFIG)
