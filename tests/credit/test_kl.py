"""Kinds of KL and their coefficients: by hand, and as recorded from EasyR1."""

import math

import pytest
import torch
from recorded import NUM_CASES, cases, needs_recorded, tensors

from vgr_trl.loss import AdaptiveKLController, FixedKLController, kl_penalty
from vgr_trl.utils import ConfigError, DataError

recorded = cases()


def test_worked_case():
    """d = ln 2 and -ln 2: k1 = d; k2 = d²/2 = 0.2402; k3 = 1/2 + ln 2 - 1 = 0.1931 and 2 - ln 2 - 1 = 0.3069."""
    logps, ref = torch.tensor([[math.log(0.5), math.log(0.25)]]), torch.tensor([[math.log(0.25), math.log(0.5)]])
    d = math.log(2)
    expected = {
        "kl": [d, -d], "abs": [d, d], "mse": [d * d / 2] * 2, "low_var_kl": [d - 0.5, 1 - d],
    }  # fmt: skip
    for kind, values in expected.items():
        assert kl_penalty(logps, ref, kind)[0].tolist() == pytest.approx(values, abs=1e-6)
    # Policy (3/4, 1/4), reference (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2 = 0.1308. Logits may be shifted.
    logits = torch.tensor([[[math.log(3) + 5, 5.0]]])
    assert kl_penalty(logits, torch.zeros(1, 1, 2), "full").item() == pytest.approx(0.130812, abs=1e-6)


def test_low_variance_kl_is_bounded():
    logps = torch.tensor([[0.0, -100.0]], requires_grad=True)
    values = kl_penalty(logps, torch.tensor([[-100.0, 0.0]]))
    assert values[0].tolist() == [10, 10]
    values.sum().backward()
    assert logps.grad[0].tolist() == [0, 0]


def test_rounding_noise_has_no_gradient_in_abs():
    """Equal policies differ by rounding, whose sign would depend on how rows are batched."""
    logps = torch.tensor([[-5e-7, 0.0, 5e-7, -2e-6, 0.5]], requires_grad=True)
    values = kl_penalty(logps, torch.zeros(1, 5), "abs")
    assert values[0].tolist() == pytest.approx([5e-7, 0, 5e-7, 2e-6, 0.5])
    values.sum().backward()
    assert logps.grad[0].tolist() == [0, 0, 0, -1, 1]


@needs_recorded
@pytest.mark.parametrize("index", range(NUM_CASES))
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "full"])
def test_values_of_the_published_code(index, kind):
    case = recorded[index]
    names = ("logits", "ref_logits") if kind == "full" else ("logps", "ref_logps")
    mask, expected = torch.tensor(case["mask"]), torch.tensor(case["kl"][kind])
    found = kl_penalty(*tensors(case, *names), kind)
    assert ((found - expected) * mask).abs().max() <= 2e-6
    assert (expected * mask).abs().max() > 0.01


@needs_recorded
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_coefficients_of_the_published_code(index):
    case = recorded[index]["adaptive"]
    controller = AdaptiveKLController(case["coefficient"], case["target"], case["horizon"])
    for mean_kl, samples, expected in case["updates"]:
        controller.update(mean_kl, samples)
        assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_coefficient_continues_and_a_fixed_one_stays():
    """KL 12 for target 6: error 1, clipped to 0.2; 500 of 10,000 samples: times 1.01."""
    adaptive, other = AdaptiveKLController(0.1), AdaptiveKLController(0.5)
    adaptive.update(12, 500)
    assert adaptive.coefficient == pytest.approx(0.101)
    other.load_state_dict(adaptive.state_dict())
    assert other.coefficient == adaptive.coefficient
    fixed = FixedKLController(0.1)
    fixed.update(12, 500)
    fixed.load_state_dict({"coefficient": 7.0})
    assert fixed.coefficient == 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveKLController(-1),
        lambda: AdaptiveKLController(0.1, target=0),
        lambda: AdaptiveKLController(0.1, horizon=float("nan")),
        lambda: FixedKLController(float("inf")),
        lambda: kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), "k3"),
    ],
)
def test_numbers_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match=r"(?:KL|horizon) is .*: give"):
        make()


@pytest.mark.parametrize(
    ("shape", "other", "kind"), [((2, 3), (2, 4), "kl"), ((2, 3), (2, 3), "full"), ((6,), (6,), "kl")]
)
def test_shapes_are_checked(shape, other, kind):
    with pytest.raises(DataError, match="give two of shape"):
        kl_penalty(torch.zeros(shape), torch.zeros(other), kind)


def test_an_adaptive_coefficient_falls_below_its_target():
    """KL 0 for target 6: error -1, held at -0.2; KL 5.4: error -0.1, within the limits; each for 500 of 10,000."""
    controller = AdaptiveKLController(0.1)
    controller.update(0, 500)
    assert controller.coefficient == pytest.approx(0.099)
    controller.update(5.4, 500)
    assert controller.coefficient == pytest.approx(0.099 * 0.995)
    controller.update(6.0, 500)
    assert controller.coefficient == pytest.approx(0.099 * 0.995)
