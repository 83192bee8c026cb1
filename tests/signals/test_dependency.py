"""Visual dependency: values by hand, its range, undefined values, gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.signals.dependency import visual_dependency

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (0.0, 0.0),
        (LN2, 2 - LN2 - 1),  # the token is twice as likely without the image
        (-LN2, 0.5 + LN2 - 1),  # half as likely
        (3.0, 10.0),  # e^3 - 4 = 16.1
        (-30.0, 10.0),  # clamped to -20 first: 20 + e^-20 - 1 = 19, then to 10
        (-math.inf, 10.0),
    ],
)
def test_values_by_hand(difference, expected):
    original = torch.tensor([[-1.5]])
    assert visual_dependency(original, original + difference).item() == pytest.approx(expected, abs=2e-6)


def test_small_differences_keep_their_precision():
    """d^2 / 2 for small d: 5e-9 for 1e-4, where e^d - d - 1 in single precision would be 0."""
    result = visual_dependency(torch.zeros(1, 1), torch.full((1, 1), 1e-4))
    assert result.item() == pytest.approx(5e-9, rel=0.02)


@given(st.lists(st.floats(-1e4, 0, width=32), min_size=2, max_size=2))
def test_range(values):
    original, perturbed = (torch.tensor([[value]]) for value in values)
    result = visual_dependency(original, perturbed).item()
    assert 0 <= result <= 10
    if values[0] == values[1]:
        assert result == 0


def test_undefined_is_nan_and_only_there():
    original = torch.tensor([[math.nan, -1.0, -math.inf, -1.0]])
    perturbed = torch.tensor([[-1.0, math.nan, -math.inf, -1.0]])
    assert visual_dependency(original, perturbed).isnan().tolist() == [[True, True, True, False]]


def test_gradients_flow_into_both_and_stop_where_it_is_clamped():
    """d/dx of e^(p - x) - (p - x) - 1 is 1 - e^(p - x)."""
    original = torch.tensor([[-1.0, -1.0, -9.0]], requires_grad=True)
    perturbed = torch.tensor([[-1.0 - LN2, -1.0, 0.0]], requires_grad=True)
    visual_dependency(original, perturbed).sum().backward()
    assert original.grad.tolist()[0] == pytest.approx([0.5, 0.0, 0.0], abs=1e-6)
    assert perturbed.grad.tolist()[0] == pytest.approx([-0.5, 0.0, 0.0], abs=1e-6)


def test_half_precision_is_computed_in_single():
    original = torch.zeros(1, 1, dtype=torch.bfloat16)
    result = visual_dependency(original, original - 1)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(1 / math.e, abs=1e-6)
