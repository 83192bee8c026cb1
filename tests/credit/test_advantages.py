import pytest
import torch
from recorded import CORE, needs_recorded, tensors

from vgr_trl.advantages import estimate_advantages, gae, token_rewards, value_loss, whiten
from vgr_trl.config import GROUP_ESTIMATORS

NAN = float("nan")


def estimate(rewards, group, estimator, baseline=None):
    baseline = None if baseline is None else torch.tensor(baseline)
    return estimate_advantages(torch.tensor(rewards, dtype=torch.float32), group, estimator, baseline).tolist()


@pytest.mark.parametrize(
    ("rewards", "estimator", "expected"),
    [
        # [0 1 2] has mean 1 and deviation 1, [4 4 4] deviation 0.
        ([0, 1, 2, 4, 4, 4], "grpo", [-1 / 1.0001, 0, 1 / 1.0001, 0, 0, 0]),
        # The others of 0 1 2 have the means 1.5, 1 and 0.5.
        ([0, 1, 2, 4, 4, 4], "rloo", [-1.5, 0, 1.5, 0, 0, 0]),
        # Equal rewards that beat the greedy completion have equal positive advantages.
        ([0, 1, 2, 4, 4, 4], "remax", [-1.5, -0.5, 0.5, 1, 1, 1]),
        # Centred: -1 0 1 and 0 0 0, with deviation sqrt(2 / 5) over the batch.
        ([0, 1, 2, 4, 4, 4], "reinforce_plus_plus", [-1.5811388, 0, 1.5811388, 0, 0, 0]),
        # The best of 2 0 1 leads by 1 with deviation 1; that of 0 3 0 by 3 with variance (1 + 4 + 1) / 2 = 3.
        ([2, 0, 1, 0, 3, 0], "grpo_passk", [1 / (1 + 1e-6), 0, 0, 0, 3 / (3**0.5 + 1e-6), 0]),
        ([2, 0, 2, 0, 0, 0], "grpo_passk", [0, 0, 0, 0, 0, 0]),  # two that are equally good
    ],
)
def test_estimators_by_hand(rewards, estimator, expected):
    baseline = [1.5, 3.0] if estimator == "remax" else None
    assert estimate(rewards, 3, estimator, baseline) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-0.7071068 / 1.0001414, 0, 0.7071068 / 1.0001414]), ("rloo", [-1, 0, 1]), ("remax", [-0.5, 0, 0.5]),
        ("reinforce_plus_plus", [-0.7071068, 0, 0.7071068]), ("grpo_passk", [0, 0, 1.4142116]),
    ],
)  # fmt: skip
def test_a_completion_without_a_reward_is_left_out(estimator, expected):
    """0 and 1 remain, with mean 0.5 and deviation sqrt(0.5) = 0.7071068."""
    baseline = [0.5] if estimator == "remax" else None
    assert estimate([0, NAN, 1], 3, estimator, baseline) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_nothing_to_compare_is_no_advantage(estimator):
    """With greedy completions that have no reward either, for `remax`.

    In single precision the mean of eight times 0.7 is not 0.7, and that rounding is all there is to divide by.
    """
    if estimator != "remax":
        equal = torch.tensor([0.1, 0.7, 2.6, 3.9]).repeat_interleave(8)
        assert estimate_advantages(equal, 8, estimator).tolist() == [0.0] * 32
        assert estimate([3.0, 5.0], 1, estimator) == [0, 0]
    baseline = [NAN] * 3 if estimator == "remax" else None
    assert estimate([NAN, NAN, NAN, 0.0, 0.0, 0.0, NAN, 5.0, NAN], 3, estimator, baseline) == [0] * 9


def test_token_rewards_by_hand():
    """The reward stands at the last valid token, a penalty at each."""
    mask, penalties = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]), torch.tensor([[1.0, 5.0, 2.0, 5.0]] * 2)
    assert token_rewards(torch.tensor([7.0, 3.0]), mask).tolist() == [[0, 0, 7, 0], [0, 3, 0, 0]]
    assert token_rewards(torch.tensor([7.0, 3.0]), mask, penalties).tolist() == [[1, 0, 9, 0], [1, 8, 0, 0]]


def test_gae_by_hand():
    """γ = 1/2, λ = 1/2, r = [0, 0, 1], V = [1/2, 1/2, 1/4]; a token of a tool is stepped over, and padding not read.

    δ = [0 + 1/4 - 1/2, 0 + 1/8 - 1/2, 1 - 1/4] = [-1/4, -3/8, 3/4]; A₂ = 3/4, A₁ = -3/8 + 3/16 = -3/16,
    A₀ = -1/4 - 3/64 = -19/64; returns A + V.
    """
    rewards, values = torch.tensor([[0, 9, 0, 1, NAN]]), torch.tensor([[0.5, 9, 0.5, 0.25, NAN]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 0, 1, 1, 0]]), gamma=0.5, lam=0.5)
    assert advantages[0].tolist() == [-19 / 64, 0, -3 / 16, 3 / 4, 0]
    assert returns[0].tolist() == [13 / 64, 0, 5 / 16, 1, 0]


@needs_recorded
@pytest.mark.parametrize("case", CORE)
def test_the_published_code(case):
    rewards, values, new, mask = tensors(case, "rewards", "values", "new_values", "mask")
    advantages, returns = gae(rewards, values, mask, case["gamma"], case["lam"])
    for found, name in ((advantages, "advantages"), (returns, "returns"), (whiten(advantages, mask), "whitened")):
        expected = torch.tensor(case["gae"][name])
        assert ((found - expected) * mask).abs().max() <= 5e-6
        assert expected.abs().max() > 0.1
    returns = torch.tensor(case["gae"]["returns"])
    loss = value_loss(new.requires_grad_(), values, returns, mask, case["value"]["cliprange_value"]).sum() / mask.sum()
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


def test_value_loss_by_hand():
    """Clipped to 1 ± 0.5, V = 3 is 1.5: errors 3 - 0 and 1.5 - 0; V = 1.2 stays. What no token counts is 0, NaN too."""
    values, old, returns = ([[3.0, 1.2, NAN]], [[1.0, 1.0, 2.0]], [[0.0, 2.0, 5.0]])
    loss = value_loss(*map(torch.tensor, (values, old, returns)), torch.tensor([[1, 1, 0]]), 0.5)
    assert loss[0].tolist() == pytest.approx([4.5, 0.32, 0])
    loss = value_loss(*map(torch.tensor, ([[3.0, 7.0]], [[3.0, 4.0]], [[3.0, 1.0]])), torch.tensor([[1, 0]]), 0.5)
    assert loss.tolist() == [[0.0, 0.0]]
