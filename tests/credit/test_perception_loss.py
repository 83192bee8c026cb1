"""The implicit perception loss, double entropy terms and entropy penalty: values and gradients by hand."""

import math

import pytest
import torch

from vgr_trl.loss import entropy_penalty, perception_divergence, perception_loss, surprisal
from vgr_trl.utils import ConfigError, DataError

LN2 = math.log(2)


def tensors(original, perturbed):
    return (torch.tensor([row], requires_grad=True) for row in (original, perturbed))


def test_divergence_by_hand():
    """Half as likely without the image: 1/2 + ln 2 - 1."""
    logps, perturbed = tensors([-1.0, -1.0, -1.0], [-1.0 - LN2, -1.0, 50.0])
    divergence = perception_divergence(logps, perturbed, torch.tensor([[1, 1, 0]]))
    assert divergence.tolist()[0] == pytest.approx([LN2 - 0.5, 0, 0], abs=1e-6)


def test_loss_by_hand():
    logps, perturbed = tensors([-1.0, -2.0], [-1.0 - LN2, -2.0])
    loss = perception_loss(
        logps,
        perturbed,
        torch.ones(1, 2),
        coefficient=0.1,
        entropy_coefficient=0.03,
        perturbed_entropy_coefficient=0.05,
    )
    expected = [-0.1 * (LN2 - 0.5) + 0.03 * 1 + 0.05 * (1 + LN2), 0.03 * 2 + 0.05 * 2]
    assert loss.tolist()[0] == pytest.approx(expected, abs=1e-6)


def test_gradients_of_the_divergence_reach_both_and_make_the_token_more_dependent():
    """-gamma · d/dx (e^d - d - 1) with d = -ln 2: -gamma · (1 - 1/2) for the original, its opposite for the other."""
    logps, perturbed = tensors([-1.0], [-1.0 - LN2])
    perception_loss(logps, perturbed, torch.ones(1, 1), coefficient=0.2).sum().backward()
    assert logps.grad.item() == pytest.approx(-0.1)
    assert perturbed.grad.item() == pytest.approx(0.1)


def test_both_entropy_terms_carry_gradients():
    logps, perturbed = tensors([-1.0, -3.0], [-2.0, -0.5])
    loss = perception_loss(
        logps,
        perturbed,
        torch.tensor([[1, 0]]),
        coefficient=0.0,
        entropy_coefficient=0.03,
        perturbed_entropy_coefficient=0.05,
    )
    loss.sum().backward()
    assert logps.grad.tolist()[0] == pytest.approx([-0.03, 0])
    assert perturbed.grad.tolist()[0] == pytest.approx([-0.05, 0])


@pytest.mark.parametrize("perturbed", [2.0, -30.0])
def test_a_clamped_token_has_no_gradient(perturbed):
    """e^3 - 4 and 29 + e^-29 - 1 are above 10."""
    logps, perturbed = tensors([-1.0], [perturbed])
    loss = perception_loss(logps, perturbed, torch.ones(1, 1), coefficient=1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-10)
    assert logps.grad.item() == perturbed.grad.item() == 0


def test_padding_is_not_read_and_gets_no_gradient():
    logps, perturbed = tensors([-1.0, math.nan, -math.inf], [-2.0, -1.0, math.nan])
    mask = torch.tensor([[1, 0, 0]])
    loss = perception_loss(logps, perturbed, mask, entropy_coefficient=1.0, perturbed_entropy_coefficient=1.0)
    loss = loss + entropy_penalty(logps, mask)
    loss.sum().backward()
    assert loss[0, 1:].tolist() == [0, 0]
    assert logps.grad[0, 1:].tolist() == perturbed.grad[0, 1:].tolist() == [0, 0]
    assert logps.grad[0, 0].isfinite()


def test_the_loss_rewards_dependence():
    """A few steps of gradient descent on a two-token policy raise the divergence."""
    scores = torch.zeros(2, requires_grad=True)  # log-odds of the token, with the image and without
    optimizer = torch.optim.SGD([scores], lr=1.0)
    with torch.no_grad():
        scores[0] = 0.1
    mask, values = torch.ones(1, 1), []
    for _ in range(20):
        logps, perturbed = torch.nn.functional.logsigmoid(scores).view(2, 1, 1)
        values.append(perception_divergence(logps, perturbed, mask).item())
        optimizer.zero_grad()
        perception_loss(logps, perturbed, mask, coefficient=1.0).sum().backward()
        optimizer.step()
    assert values == sorted(values)
    assert values[-1] > 5 * values[0]


def test_entropy_penalty():
    logps = torch.tensor([[-1.0, -3.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    penalty = entropy_penalty(logps, mask)
    assert penalty.tolist()[0] == pytest.approx([0.06, 0.18, 0])
    (penalty.sum() / mask.sum()).backward()
    assert logps.grad.tolist()[0] == pytest.approx([-0.03, -0.03, 0])
    assert surprisal(logps, mask).tolist() == [[1.0, 3.0, 0.0]]


@pytest.mark.parametrize("name", ["coefficient", "entropy_coefficient", "perturbed_entropy_coefficient"])
def test_coefficients_out_of_range(name):
    with pytest.raises(ConfigError, match=rf"^{name} is -1: give a number of at least 0\.$"):
        perception_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), **{name: -1})


def test_entropy_penalty_out_of_range():
    with pytest.raises(ConfigError, match=r"^coefficient is nan: give a number of at least 0\.$"):
        entropy_penalty(torch.zeros(1, 1), torch.ones(1, 1), math.nan)


def test_shapes():
    with pytest.raises(
        DataError, match=r"^perception_divergence got perturbed_logps of shape \(1, 2\) and a mask of sh"
    ):
        perception_loss(torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 1))
    with pytest.raises(DataError, match=r"^surprisal got logps of shape \(1, 2\) and a mask of shape \(1, 1\): give"):
        entropy_penalty(torch.zeros(1, 2), torch.ones(1, 1))
