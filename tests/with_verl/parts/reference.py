"""What verl and EasyR1 are compared with: our scorer on the plain model, gradients by hand, VPPO's published code."""

import json
from pathlib import Path

import pytest
import torch
from tiny_rollout import GROUP, rollout, tiny_model

from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.integrations.verl.signals import black_of, perturb_row
from vgr_trl.loss import entropy_penalty, perception_loss
from vgr_trl.signals import RolloutScorer, visual_dependency
from vgr_trl.signals.ratios import special_token_ids, token_vision_gain_ratio

WANTED = {
    "enable_token_weights": True,
    "token_weight_last_k_layers": 1,
    "enable_perception_filtering": True,
    "use_entropy_penalty": True,
    "perception_loss_weight": 0.5,
    "der_loss_weight2": 0.1,
}
STEP = 3  # of the optimizer, for the perturbed images
GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "vppo.json"
CASES = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else []
needs_golden = pytest.mark.skipif(not CASES, reason="needs ../shared/golden/vppo.json")


class Reference:
    """A rollout of four prompts, and what it gives without verl."""

    def __init__(self):
        self.model, self.processor = tiny_model()
        self.model.eval()
        self.tensors, self.pixels = rollout(self.model, self.processor, prompts=4)
        self.mask = self.tensors["response_mask"].bool()
        options, black = SignalOptions.read(WANTED), black_of(self.processor)
        self.perturbed = [perturb_row(row, options, STEP, black) for row in self.pixels]
        generator = torch.Generator().manual_seed(9)
        self.advantages = torch.randn(self.mask.shape, generator=generator) * self.mask

    def scored(self, pixels):
        """Signals of the whole rollout by the scorer of this library."""
        prompt, mask = self.tensors["prompts"].size(1), self.tensors["attention_mask"]
        scorer = RolloutScorer(self.model, special_token_ids=special_token_ids(self.processor))
        types = (self.tensors["prompts"] == self.model.config.image_token_id).long()
        return scorer.score(
            self.tensors["prompts"], mask[:, :prompt], self.tensors["responses"], mask[:, prompt:],
            num_generations=GROUP, mm_token_type_ids=types, **joined(pixels),
        )  # fmt: skip

    def gradients(self, old):
        """Of the clipped objective at ratio 1, the entropy penalty and the perception loss, token mean of all rows."""
        self.model.zero_grad()
        logps, blind = (self._log_probabilities(rows) for rows in (self.pixels, self.perturbed))
        objective = -(logps - old).masked_fill(~self.mask, 0).exp() * self.advantages
        terms = entropy_penalty(logps, self.mask, 0.06) + perception_loss(
            logps, blind, self.mask, coefficient=0.5, perturbed_entropy_coefficient=0.1
        )
        ((objective + terms) * self.mask).sum().div(self.mask.sum()).backward()
        named = self.model.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

    def _log_probabilities(self, pixels):
        types = (self.tensors["input_ids"] == self.model.config.image_token_id).long()
        inputs = {name: self.tensors[name] for name in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, mm_token_type_ids=types, **joined(pixels)).logits
        responses = self.tensors["responses"]
        logps = logits[:, -responses.size(1) - 1 : -1].log_softmax(-1)
        return logps.gather(-1, responses.unsqueeze(-1)).squeeze(-1)

    def check_columns(self, logps, columns):
        """Log-probabilities, the ratio of the last layer and the dependency are those of the scorer."""
        plain, other = self.scored(self.pixels), self.scored(self.perturbed)
        assert (logps - plain.logps)[self.mask].abs().max() < 1e-5
        expected = token_vision_gain_ratio(plain.attention, [3])[self.mask]
        ratio = columns["vgr_instruction"] / columns["vgr_vision"]
        assert torch.allclose(ratio[self.mask], expected, rtol=1e-4)
        assert torch.allclose(columns["vgr_token"][self.mask], expected, rtol=1e-4)
        dependency = visual_dependency(plain.logps, other.logps)
        assert (columns["vgr_dependency"] - dependency)[self.mask].abs().max() < 1e-4
        assert dependency[self.mask].max() > 1e-2


def check_gradients(found, expected):
    """To 1e-5 of the largest."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    assert set(expected) == set(found)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * largest + 1e-6, name


def joined(pixels):
    return {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}


def golden(case):
    """Columns, mask, advantages, and log-probabilities with gradients of a case of VPPO's published code."""
    names = ("old_logps", "perturbed_logps", "entropies", "logps", "advantages")
    old, perturbed, entropies, logps, advantages = (torch.tensor(case[name]) for name in names)
    mask = torch.arange(old.size(1)) < torch.tensor(case["lengths"]).unsqueeze(1)
    columns = {"vgr_dependency": visual_dependency(old, perturbed), "entropies": entropies}
    stated = {"enable_perception_filtering": False, "enable_trajectory_reweighting": False, "estimator": "given"}

    def given(response_mask, **_):
        each = advantages.unsqueeze(1) * response_mask
        return each, each

    return old, logps.requires_grad_(), mask, columns, stated | case["options"], given


def check_golden(logps, case):
    assert (logps.grad - torch.tensor(case["grad"])).abs().max() <= 1e-6
    assert logps.grad.abs().max() > 1e-3
