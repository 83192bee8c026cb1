"""How distributions shift under a perturbation, measured in a run: against logits of plain forward passes."""

import functools

import pytest
import torch
from support.trainers import letters_reward, logged
from trl import GRPOTrainer

from vgr_trl import trainer as spreading
from vgr_trl.signals.ratios import jensen_shannon

VEPO = {"credit_rules": ["vepo"], "max_steps": 1, "perturbation": "mask_image", "signals": ["jsd"]}


@pytest.fixture
def seen(monkeypatch):
    """Passes over the rollout: inputs by name; and the signals that credit is spread by."""
    found = {"passes": [], "signals": []}
    plain, shape = GRPOTrainer._get_per_token_logps_and_entropies, spreading.shape_advantages

    @functools.wraps(plain)
    def kept(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **more):
        if not torch.is_grad_enabled() and model is not self.ref_model:
            found["passes"].append((input_ids, attention_mask, logits_to_keep, more))
        return plain(self, model, input_ids, attention_mask, logits_to_keep, batch_size, **more)

    def shaped(advantages, signals, *args, **more):
        found["signals"].append(signals)
        return shape(advantages, signals, *args, **more)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", kept)
    monkeypatch.setattr(spreading, "shape_advantages", shaped)
    return found


def logits_of(model, passed, temperature):
    """(N, T, vocabulary) by a plain forward pass."""
    ids, mask, count, more = passed
    images = {name: more[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids") if name in more}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **images).logits
    return logits[:, -count - 1 : -1].float() / temperature


@pytest.mark.parametrize("changed", [{}, {"share_prompts": "off", "kl_coef": 0.1, "kl_penalty": "full"}])
def test_shift_of_a_rollout_is_that_of_plain_logits(vision_trainer, seen, changed):
    changed = {"temperature": 0.7, "compute_attention_metrics": False} | changed
    trainer = vision_trainer(letters_reward, **VEPO, **changed)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(start)
    (original, perturbed), (signals,) = seen["passes"], seen["signals"]
    first, second = (logits_of(trainer.model.eval(), passed, 0.7) for passed in (original, perturbed))
    mask, logps = signals.mask.bool(), torch.log_softmax(second, -1)
    assert torch.allclose(signals.jsd[mask], jensen_shannon(first, second)[mask], atol=1e-5)
    assert torch.allclose(signals.perturbed_entropies[mask], -(logps.exp() * logps).sum(-1)[mask], atol=1e-4)
    assert signals.jsd[mask].max() > 1e-4
    assert logged(trainer, "signals/jsd") == [pytest.approx(signals.jsd[mask].mean().item(), abs=1e-6)]
    assert logged(trainer, "credit/vepo/token_fraction")[0] < 0.5


def test_divergence_by_hand():
    """(1, 0) from (½, ½), whose mean is (¾, ¼): ½ ln 4/3 + ½ (½ ln 2/3 + ½ ln 2) = 0.2158; (1, 0) from (0, 1): ln 2."""
    one, even, other = (torch.tensor([values]).log() for values in ([1.0, 0.0], [0.5, 0.5], [0.0, 1.0]))
    assert jensen_shannon(one, even).item() == pytest.approx(0.2157615, abs=1e-6)
    assert jensen_shannon(one, other).item() == pytest.approx(0.6931472, abs=1e-6)
    assert jensen_shannon(even, even).item() == 0
