import math

import pytest
import torch
from recorded import CORE, needs_recorded, tensors

from vgr_trl import loss
from vgr_trl.loss import terms

LN2 = math.log(2)


def test_kl_by_hand():
    """d = ln 2 and -ln 2: k1 = d; k2 = d²/2 = 0.2402; k3 = 1/2 + ln 2 - 1 = 0.1931 and 2 - ln 2 - 1 = 0.3069."""
    logps, ref = torch.tensor([[-LN2, -2 * LN2]]), torch.tensor([[-2 * LN2, -LN2]])
    expected = {"kl": [LN2, -LN2], "abs": [LN2, LN2], "mse": [LN2**2 / 2] * 2, "low_var_kl": [LN2 - 0.5, 1 - LN2]}
    for kind, values in expected.items():
        assert loss.kl_penalty(logps, ref, kind)[0].tolist() == pytest.approx(values, abs=1e-6)
    # Policy (3/4, 1/4), reference (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2 = 0.1308. Logits may be shifted.
    logits = torch.tensor([[[math.log(3) + 5, 5.0]]])
    assert loss.kl_penalty(logits, torch.zeros(1, 1, 2), "full").item() == pytest.approx(0.130812, abs=1e-6)


def test_rounding_noise_has_no_gradient_in_abs():
    """Equal policies differ by rounding, whose sign would depend on how rows are batched."""
    logps = torch.tensor([[-5e-7, 0.0, 5e-7, -2e-6, 0.5]], requires_grad=True)
    values = loss.kl_penalty(logps, torch.zeros(1, 5), "abs")
    assert values[0].tolist() == pytest.approx([5e-7, 0, 5e-7, 2e-6, 0.5])
    values.sum().backward()
    assert logps.grad[0].tolist() == [0, 0, 0, -1, 1]


@needs_recorded
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "full"])
def test_kl_of_the_published_code(kind):
    for case in CORE:
        names = ("logits", "ref_logits") if kind == "full" else ("logps", "ref_logps")
        mask, expected = torch.tensor(case["mask"]), torch.tensor(case["kl"][kind])
        found = loss.kl_penalty(*tensors(case, *names), kind)
        assert ((found - expected) * mask).abs().max() <= 2e-6
        assert (expected * mask).abs().max() > 0.01


@needs_recorded
def test_coefficients_of_the_published_code():
    for case in (each["adaptive"] for each in CORE):
        controller = loss.AdaptiveKLController(case["coefficient"], case["target"], case["horizon"])
        for mean_kl, samples, expected in case["updates"]:
            controller.update(mean_kl, samples)
            assert controller.coefficient == pytest.approx(expected, rel=1e-12)
        fixed = loss.FixedKLController(0.0)
        fixed.load_state_dict(controller.state_dict())
        fixed.update(100.0, 1)
        assert fixed.coefficient == controller.coefficient


def leaves(original, perturbed):
    return (torch.tensor([row], requires_grad=True) for row in (original, perturbed))


def test_loss_and_its_gradients_by_hand():
    """Half as likely without the image: 1/2 + ln 2 - 1, with the derivative 1 - 1/2; padding is left out."""
    logps, perturbed = leaves([-1.0, -2.0, -1.0], [-1.0 - LN2, -2.0, 50.0])
    weights = {"coefficient": 0.1, "entropy_coefficient": 0.03, "perturbed_entropy_coefficient": 0.05}
    loss = terms.perception_loss(logps, perturbed, torch.tensor([[1, 1, 0]]), **weights)
    expected = [-0.1 * (LN2 - 0.5) + 0.03 * 1 + 0.05 * (1 + LN2), 0.03 * 2 + 0.05 * 2, 0]
    assert loss.tolist()[0] == pytest.approx(expected, abs=1e-6)
    loss.sum().backward()
    assert logps.grad.tolist()[0] == pytest.approx([-0.05 - 0.03, -0.03, 0], abs=1e-6)
    assert perturbed.grad.tolist()[0] == pytest.approx([0.05 - 0.05, -0.05, 0], abs=1e-6)


@pytest.mark.parametrize("perturbed", [2.0, -30.0])
def test_a_clamped_token_has_no_gradient(perturbed):
    """e^3 - 4 and 29 + e^-29 - 1 are above 10."""
    logps, perturbed = leaves([-1.0], [perturbed])
    loss = terms.perception_loss(logps, perturbed, torch.ones(1, 1), coefficient=1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-10)
    assert logps.grad.item() == perturbed.grad.item() == 0


def test_entropy_penalty_and_padding_that_is_not_read():
    logps, perturbed = leaves([-1.0, -3.0, math.nan], [-2.0, -1.0, -math.inf])
    mask = torch.tensor([[1, 1, 0]])
    penalty = terms.entropy_penalty(logps, mask)
    assert penalty.tolist()[0] == pytest.approx([0.06, 0.18, 0])
    (penalty.sum() / mask.sum()).backward()
    assert logps.grad.tolist()[0] == pytest.approx([-0.03, -0.03, 0])
    loss = terms.perception_loss(logps, perturbed, mask, entropy_coefficient=1.0, perturbed_entropy_coefficient=1.0)
    loss.sum().backward()
    assert loss[0, 2] == logps.grad[0, 2] == perturbed.grad[0, 2] == 0


def test_divergence_from_a_teacher_by_hand():
    """Of four tokens the teacher's two are 1/2 and 1/4, and the others 1/4; the policy's 1/4, 1/8 and 5/8.

    Forward 3/4 ln 2 + 1/4 ln 2/5 = 0.2908; reverse -3/8 ln 2 + 5/8 ln 5/2 = 0.3128; to the mixture 3/8, 3/16, 7/16 half
    of 3/4 ln 4/3 + 1/4 ln 4/7 + 3/8 ln 2/3 + 5/8 ln 10/7 = 0.0734.
    """
    logits = torch.tensor([1 / 4, 1 / 2, 1 / 8, 1 / 8], dtype=torch.float64).log() + 3  # shifted
    ids, teacher = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1 / 2, 1 / 4, 1 / 4]).double().log()
    expected = {"forward": 0.290788, "reverse": 0.312752, "jensen_shannon": 0.073365}
    for kind, value in expected.items():
        assert loss.teacher_divergence(logits, ids, teacher, kind).item() == pytest.approx(value, abs=1e-6), kind
    every = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]).double().log()  # KL over all: 1/2 ln 2 - 1/4 ln 2
    found = loss.teacher_divergence(logits, torch.arange(4), every, "forward")
    assert found.item() == pytest.approx(LN2 / 4)


@pytest.mark.parametrize("kind", ["full", "forward", "reverse", "jensen_shannon", "all others"])
def test_a_token_that_both_distributions_forbid_adds_nothing(kind):
    """Divergence and gradient are those over the tokens that are left."""
    found = []
    for forbidden in ([], [-math.inf]):
        logits = torch.tensor([0.3, -0.2, *forbidden], requires_grad=True)
        teacher = torch.tensor([1.1, 0.4, *forbidden])
        if kind == "full":
            divergence = loss.kl_penalty(logits.view(1, 1, -1), teacher.view(1, 1, -1), kind)
        elif kind == "all others" and forbidden:
            logps = torch.cat([teacher[:2].log_softmax(-1), torch.tensor(forbidden)])
            divergence = loss.teacher_divergence(logits, torch.arange(2), logps)
        else:
            name = "jensen_shannon" if kind == "all others" else kind
            divergence = loss.teacher_divergence(logits, torch.arange(len(teacher)), teacher.log_softmax(-1), name)
        divergence.sum().backward()
        found.append([divergence.item(), *logits.grad.tolist()])
    assert found[1] == pytest.approx([*found[0], 0.0], abs=1e-7)


def test_gated_distillation_by_hand():
    """Gaps of ln 2 and -ln 2 at beta 1: gates of 2/3 and 1/3, without a gradient."""
    logps, teacher = leaves([-2 * LN2, -LN2], [-LN2, -2 * LN2])
    values = loss.gated_distillation(logps, teacher.detach(), beta=1.0)
    values.sum().backward()
    assert values.tolist()[0] == pytest.approx([2 / 3 * LN2, -1 / 3 * LN2])
    assert logps.grad.tolist()[0] == pytest.approx([-2 / 3, -1 / 3])
    assert loss.gated_distillation(logps, teacher, beta=0.0).tolist()[0] == pytest.approx([LN2 / 2, -LN2 / 2])
