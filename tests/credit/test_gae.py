"""Generalised advantage estimation, whitening and the clipped value loss: by hand, and as recorded from EasyR1."""

import pytest
import torch
from recorded import NUM_CASES, cases, needs_recorded, tensors

from vgr_trl.advantages import gae, value_loss, whiten
from vgr_trl.utils import ConfigError, DataError

recorded = cases()


def test_worked_case():
    """γ = 1/2, λ = 1/2, r = [0, 0, 1], V = [1/2, 1/2, 1/4].

    δ = [0 + 1/4 - 1/2, 0 + 1/8 - 1/2, 1 - 1/4] = [-1/4, -3/8, 3/4]; A₂ = 3/4, A₁ = -3/8 + 3/16 = -3/16,
    A₀ = -1/4 - 3/64 = -19/64; returns A + V.
    """
    nan = float("nan")
    rewards, values = torch.tensor([[0, 0, 1, nan]]), torch.tensor([[0.5, 0.5, 0.25, nan]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]), gamma=0.5, lam=0.5)
    assert advantages[0].tolist() == [-19 / 64, -3 / 16, 3 / 4, 0]
    assert returns[0].tolist() == [13 / 64, 5 / 16, 1, 0]


def test_tokens_of_a_tool_are_stepped_over():
    mask = torch.tensor([[1, 0, 0, 1]])
    rewards, values = torch.tensor([[0.0, 9, 9, 1]]), torch.tensor([[0.25, 9, 9, 0.5]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5)
    dense, dense_returns = gae(rewards[:, [0, 3]], values[:, [0, 3]], torch.ones(1, 2), gamma=0.5)
    assert advantages[0].tolist() == [dense[0, 0], 0, 0, dense[0, 1]]
    assert returns[0].tolist() == [dense_returns[0, 0], 0, 0, dense_returns[0, 1]]


@needs_recorded
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_values_of_the_published_code(index):
    case = recorded[index]
    rewards, values, mask = tensors(case, "rewards", "values", "mask")
    advantages, returns = gae(rewards, values, mask, case["gamma"], case["lam"])
    for found, name in ((advantages, "advantages"), (returns, "returns"), (whiten(advantages, mask), "whitened")):
        expected = torch.tensor(case["gae"][name])
        assert ((found - expected) * mask).abs().max() <= 5e-6
        assert expected.abs().max() > 0.1


@needs_recorded
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_value_loss_of_the_published_code(index):
    case = recorded[index]
    new, old, mask = tensors(case, "new_values", "values", "mask")
    returns = torch.tensor(case["gae"]["returns"])
    new.requires_grad_()
    loss = value_loss(new, old, returns, mask, case["value"]["cliprange_value"]).sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["value"]["loss"], abs=1e-6)
    assert (new.grad - torch.tensor(case["value"]["gradient"])).abs().max() <= 1e-6


def test_whitening_is_over_all_processes():
    """[1, 2] here and [3, 6] there: mean 3, variance (4 + 1 + 0 + 9) / 3."""
    values, mask = torch.tensor([[1.0, 2.0, 7.0]]), torch.tensor([[1, 1, 0]])
    other = iter([torch.tensor(2), torch.tensor(9.0), torch.tensor(9.0)])

    def gather(local):
        return torch.cat([local, next(other).to(local).view(1)])

    found = whiten(values, mask, gather)[0].tolist()
    deviation = (14 / 3) ** 0.5
    assert found == pytest.approx([-2 / deviation, -1 / deviation, 0], abs=1e-6)


def test_whitening_of_two_tokens():
    """[1, 3]: mean 2, variance (1 + 1) / (2 - 1)."""
    assert whiten(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2))[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_ranges_and_shapes_are_checked():
    zeros = torch.zeros(1, 2)
    for options in ({"gamma": 1.5}, {"lam": -0.1}):
        with pytest.raises(ConfigError, match=r"give a number in \[0, 1\]"):
            gae(zeros, zeros, zeros, **options)
    with pytest.raises(ConfigError, match="cliprange_value is 0"):
        value_loss(zeros, zeros, zeros, zeros, 0)
    with pytest.raises(DataError, match="gae got values"):
        gae(zeros, torch.zeros(1, 3), zeros)


def test_value_loss_by_hand():
    """Clipped to 1 ± 0.5, V = 3 is 1.5: errors 3 - 0 and 1.5 - 0; V = 1.2 stays. What no token counts is 0, NaN too."""
    nan = float("nan")
    values, old, returns = ([[3.0, 1.2, nan]], [[1.0, 1.0, 2.0]], [[0.0, 2.0, 5.0]])
    loss = value_loss(*map(torch.tensor, (values, old, returns)), torch.tensor([[1, 1, 0]]), 0.5)
    assert loss[0].tolist() == pytest.approx([4.5, 0.32, 0])
    loss = value_loss(*map(torch.tensor, ([[3.0, 7.0]], [[3.0, 4.0]], [[3.0, 1.0]])), torch.tensor([[1, 0]]), 0.5)
    assert loss.tolist() == [[0.0, 0.0]]


def test_whitening_of_one_token_and_of_none():
    found = whiten(torch.tensor([[5.0, 7.0]]), torch.tensor([[1, 0]]))
    assert (found.tolist(), found.dtype) == ([[0.0, 0.0]], torch.float32)
    assert whiten(torch.tensor([[5.0]]), torch.tensor([[0]])).tolist() == [[0.0]]
