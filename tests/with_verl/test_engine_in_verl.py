"""verl's FSDP engine with signals, on a CPU: what it measures, and the gradients of its losses."""

import json
from pathlib import Path

import pytest
import torch
from support.launching import launch
from tiny_rollout import GROUP, rollout, tiny_model

from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.integrations.verl.signals import black_of, perturb_row
from vgr_trl.loss import entropy_penalty, perception_loss
from vgr_trl.signals import RolloutScorer, visual_dependency
from vgr_trl.signals.ratios import special_token_ids, token_vision_gain_ratio

WORKER = Path(__file__).parent / "parts" / "engine_worker.py"
WANTED = {
    "enable_token_weights": True,
    "token_weight_last_k_layers": 1,
    "enable_perception_filtering": True,
    "use_entropy_penalty": True,
    "perception_loss_weight": 0.5,
    "der_loss_weight2": 0.1,
}


@pytest.fixture(scope="module")
def tiny():
    model, processor = tiny_model()
    return model.eval(), processor, *rollout(model, processor, prompts=4)


def reference(tiny, pixels):
    """Signals of the whole rollout by the scorer of this library, one process, no verl."""
    model, processor, tensors, _ = tiny
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    images = {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}
    prompt = tensors["prompts"].size(1)
    mask = tensors["attention_mask"]
    types = (tensors["prompts"] == model.config.image_token_id).long()
    return scorer.score(
        tensors["prompts"], mask[:, :prompt], tensors["responses"], mask[:, prompt:], num_generations=GROUP,
        mm_token_type_ids=types, **images,
    )  # fmt: skip


def measured(folder, layout, processes, options=WANTED):
    launch(WORKER, folder, layout, json.dumps(options), processes=processes)
    parts = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    columns = {
        name: torch.cat([torch.tensor(part[name]) for part in parts])
        for name in parts[0]
        if name not in ("shared", "reasons")
    }
    return columns, parts, torch.load(folder / "gradients.pt")


def perturbed(tiny):
    _, processor, _, pixels = tiny
    options = SignalOptions.read(WANTED)
    return [perturb_row(row, options, 3, black_of(processor)) for row in pixels]


@pytest.mark.parametrize(("layout", "processes"), [("padded", 1), ("packed", 1), ("padded", 2), ("packed", 2)])
def test_signals_and_gradients(tiny, layout, processes, tmp_path):
    model, _, tensors, pixels = tiny
    columns, parts, gradients = measured(tmp_path, layout, processes)
    mask = tensors["response_mask"].bool()
    plain, other = reference(tiny, pixels), reference(tiny, perturbed(tiny))
    assert (columns["log_probs"] - plain.logps)[mask].abs().max() < 1e-5
    late = token_vision_gain_ratio(plain.attention, [3])
    ratio = columns["vgr_instruction"] / columns["vgr_vision"]
    assert torch.allclose(ratio[mask], late[mask], rtol=1e-4)
    assert torch.allclose(columns["vgr_token"][mask], late[mask], rtol=1e-4)
    dependency = visual_dependency(plain.logps, other.logps)
    assert (columns["vgr_dependency"] - dependency)[mask].abs().max() < 1e-4
    assert dependency[mask].max() > 1e-2
    for part in parts:
        if layout == "packed":
            assert part["shared"] is None
        else:
            assert part["shared"] == 1 / GROUP

    expected = gradients_of_the_losses(model, tensors, pixels, perturbed(tiny), columns["log_probs"])
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert largest > 1e-3
    assert set(expected) == set(gradients)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-5 * largest + 1e-6, name


def gradients_of_the_losses(model, tensors, pixels, dark, old):
    """Of the clipped objective at ratio 1, the entropy penalty and the perception loss, token mean of all rows."""
    generator = torch.Generator().manual_seed(9)
    mask = tensors["response_mask"].bool()
    advantages = torch.randn(mask.shape, generator=generator) * mask
    model.zero_grad()
    logps, blind = (log_probabilities(model, tensors, rows) for rows in (pixels, dark))
    objective = -(logps - old).masked_fill(~mask, 0).exp() * advantages
    terms = entropy_penalty(logps, mask, 0.06) + perception_loss(
        logps, blind, mask, coefficient=0.5, perturbed_entropy_coefficient=0.1
    )
    ((objective + terms) * mask).sum().div(mask.sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def log_probabilities(model, tensors, pixels):
    images = {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}
    types = (tensors["input_ids"] == model.config.image_token_id).long()
    given = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    logits = model(**given, mm_token_type_ids=types, **images).logits
    length = tensors["responses"].size(1)
    logps = logits[:, -length - 1 : -1].log_softmax(-1)
    return logps.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)
