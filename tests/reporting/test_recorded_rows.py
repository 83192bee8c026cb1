"""Rows of a batch as completions of a record: which ones, their tokens, images and maps, the batch in numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.reporting.recorded_rows import (
    split_tokens,
    summarise_rollout,
)

QWEN = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2))
TOKENIZER = build_processor(["what colour is the circle?", "red blue", "a red"]).tokenizer


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_pieces_of_any_tokens_are_the_text_also_where_bytes_are_none(ids):
    pieces = split_tokens(ids, decode)
    assert (len(pieces), "".join(pieces)) == (len(ids), decode(ids))
    of_bytes = TOKENIZER("é").input_ids  # two bytes, which no token joins
    assert split_tokens([*of_bytes, *TOKENIZER(" red").input_ids], decode) == ["", "é", " red"]


def test_a_batch_in_numbers():
    # Accuracy 1, 0, 1 and one row that it does not apply to; totals 1·a + 2·b are 1, 1, 3 and 2.
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [math.nan, 1.0]])
    metrics = {"attention/late/vgr": 2.0, "attention/prompt/late/vgr": 9.0, "token_weight_mean": 1.0, "kl": 3.0,
               "combined_token_fraction": 0.5}  # fmt: skip
    summary = summarise_rollout(rewards, ["accuracy_reward", "other"], torch.tensor([1.0, 2.0]), metrics)
    assert summary.completions == 4
    assert summary.success_rate == pytest.approx(2 / 3)
    assert summary.rewards["accuracy_reward"] == pytest.approx((2 / 3, math.sqrt(1 / 3)))
    assert summary.rewards["other"] == pytest.approx((0.625, math.sqrt((0.625**2 + 0.125**2 + 2 * 0.375**2) / 3)))
    assert summary.rewards["total"] == pytest.approx((1.75, math.sqrt((2 * 0.75**2 + 1.25**2 + 0.25**2) / 3)))
    assert summary.segments == {"late": {"vgr": 2.0}}
    assert summary.credit == {"token_weight_mean": 1.0, "combined_token_fraction": 0.5}
    nothing = summarise_rollout(torch.full((1, 1), math.nan), ["accuracy_reward"], torch.tensor([1.0]), {})
    assert all(map(math.isnan, (nothing.success_rate, *nothing.rewards["accuracy_reward"])))
    assert summarise_rollout(rewards[:, 1:], ["other"], torch.tensor([1.0]), {}).success_rate is None
