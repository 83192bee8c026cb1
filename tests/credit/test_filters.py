"""Tokens with the largest scores: exactly ⌈p · length⌉, never padding, ties, undefined scores."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vgr_trl.credit import top_fraction_mask
from vgr_trl.utils import ConfigError, DataError


def test_by_hand():
    """Lengths 5, 2, 1 and 0 at p = 0.4 keep 2, 1, 1 and 0 tokens."""
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.7, 0.2], [0.4, 0.5, 9.0, 9.0, 9.0], [-3.0, 9, 9, 9, 9], [9.0, 9, 9, 9, 9]])
    mask = torch.arange(5) < torch.tensor([5, 2, 1, 0]).unsqueeze(1)
    assert top_fraction_mask(scores, mask, 0.4).int().tolist() == [
        [0, 1, 0, 1, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_valid_tokens_may_lie_anywhere():
    """Tool outputs are invalid in the middle; -inf is a score like another."""
    scores = torch.tensor([[-torch.inf, 5.0, -torch.inf, 7.0, -torch.inf]])
    mask = torch.tensor([[0, 0, 1, 0, 1]], dtype=torch.bool)
    assert top_fraction_mask(scores, mask, 1.0).tolist() == mask.tolist()
    assert top_fraction_mask(scores, mask.int(), 0.5).int().tolist() == [[0, 0, 1, 0, 0]]


def test_equal_scores_keep_the_earlier_token_and_undefined_ones_come_last():
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [math.nan, 0.0, math.nan, -torch.inf]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert top_fraction_mask(scores, mask, 0.5).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert top_fraction_mask(scores[1:], mask[1:], 0.25).int().tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(("fraction", "length", "kept"), [(0.07, 100, 7), (0.55, 100, 55), (0.2, 15, 3), (1e-12, 9, 1)])
def test_fraction_is_the_decimal_number_that_was_written(fraction, length, kept):
    """In floating point 0.07 · 100 is 7.000000000000001 and 0.55 · 100 is 55.00000000000001."""
    mask = torch.ones(1, length, dtype=torch.bool)
    assert top_fraction_mask(torch.randn(1, length), mask, fraction).sum() == kept


@given(
    scores=arrays("float32", (3, 17), elements=st.floats(width=32)),
    valid=arrays("bool", (3, 17)),
    hundredths=st.integers(0, 100),
)
def test_counts_and_choice(scores, valid, hundredths):
    scores, mask = torch.from_numpy(scores), torch.from_numpy(valid)
    kept = top_fraction_mask(scores, mask, hundredths / 100)
    assert not (kept & ~mask).any()
    for row in range(3):
        assert kept[row].sum() == math.ceil(Fraction(hundredths, 100) * int(mask[row].sum()))
        chosen, other = scores[row, kept[row]], scores[row, mask[row] & ~kept[row]]
        defined = chosen[~chosen.isnan()]
        if len(defined) and len(other):
            assert other[~other.isnan()].le(defined.min()).all()
        if chosen.isnan().any():
            assert other.isnan().all() or (other[~other.isnan()] == -torch.inf).all()


def test_no_tokens_and_no_rows():
    for shape in ((2, 0), (0, 4)):
        result = top_fraction_mask(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), 0.4)
        assert result.shape == shape


@pytest.mark.parametrize("fraction", [-0.1, 1.5, math.nan, None, "half"])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ConfigError, match=r"^fraction is .*: give a number in \[0, 1\]\.$"):
        top_fraction_mask(torch.zeros(1, 1), torch.ones(1, 1), fraction)


def test_shapes():
    with pytest.raises(
        DataError, match=r"^top_fraction_mask got scores of shape \(2, 3\) and a mask of shape \(2, 4\)"
    ):
        top_fraction_mask(torch.zeros(2, 3), torch.ones(2, 4), 0.5)
    with pytest.raises(
        DataError, match=r"^top_fraction_mask got a mask of shape \(4,\): give one of shape \(N, T\)\.$"
    ):
        top_fraction_mask(torch.zeros(4), torch.ones(4), 0.5)


def test_fractions_of_numpy():
    mask = torch.ones(1, 10, dtype=torch.bool)
    assert top_fraction_mask(torch.arange(10.0).view(1, 10), mask, np.float64(0.3))[0].nonzero().flatten().tolist() == [
        7, 8, 9,
    ]  # fmt: skip
