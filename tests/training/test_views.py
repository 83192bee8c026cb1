"""The dependency under several perturbations: one pass, and what each of them alone gives."""

from copy import copy

import pytest
import torch

from vgr_trl.config import PerturbationOptions
from vgr_trl.measure import score_perturbed
from vgr_trl.signals.named import RolloutSignals, add_named, columns_to_signals, named_signals, signals_to_columns


def rollout_of(run, monkeypatch):
    """The rollout of one step of a trainer, scored under perturbations."""
    found = []

    def measured(trainer, rollout):
        score_perturbed(trainer, rollout)
        found.append(copy(rollout))

    monkeypatch.setattr("vgr_trl.trainer.score_perturbed", measured)
    run.train()
    return found[0]


def asked_without_images(run, rollout):
    """(N, T) log-probabilities, each row alone: its text, tokenized without the image, and its completion."""
    rows = []
    for messages, completion in zip(rollout.messages, rollout.batch["completion_ids"], strict=True):
        text = [
            {"role": message["role"], "content": [part for part in message["content"] if part["type"] == "text"]}
            for message in messages
        ]
        prompt = run.processing_class.apply_chat_template(
            text, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        ids = torch.cat([prompt, completion[None]], dim=1)
        with torch.no_grad():
            logits = run.model(input_ids=ids).logits[0, prompt.size(1) - 1 : -1] / run.temperature
        rows.append(logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(("share", "over"), [("on", "mean"), ("off", "min")])
def test_the_question_without_its_image(share, over, vision_trainer, monkeypatch):
    """In one pass with a perturbed image, and equal to each row alone, with no token of the image."""
    run = vision_trainer(
        max_steps=1, credit_rules=["trajectory_scale"], signals=["stability"], share_prompts=share,
        perturbation="remove_image", further_perturbations=["gaussian_blur"], learning_rate=0.0,
        dependency_over=over,
    )  # fmt: skip
    passes, scored = [], run.score
    monkeypatch.setattr(
        run, "score", lambda inputs, *more, **named: passes.append(inputs) or scored(inputs, *more, **named)
    )
    rollout = rollout_of(run, monkeypatch)
    signals = rollout.signals
    expected = asked_without_images(run, rollout)
    valid = signals.mask.bool()
    assert torch.allclose(signals.views["remove_image"][valid], expected[valid], atol=1e-5)
    text, blurred = signals.views["remove_image"], signals.views["gaussian_blur"]
    each = torch.stack([(seen - signals.logps).exp() - (seen - signals.logps) - 1 for seen in (text, blurred)])
    dependency = each.mean(0) if over == "mean" else each.amin(0)
    assert torch.allclose(signals.dependency[valid], dependency[valid], atol=1e-5)
    assert torch.allclose(signals.extra["stability"][valid], (1 - (text.exp() - blurred.exp()).abs())[valid], atol=1e-6)
    perturbed = passes[-1]
    assert perturbed["num_images"] == [0] * 8 + [1] * 8
    image = run.processing_class.tokenizer.convert_tokens_to_ids(run.processing_class.image_token)
    assert (perturbed["input_ids"] == image).any(1).tolist() == [False] * 8 + [True] * 8


def test_stability_by_hand_and_through_a_buffer():
    """Probabilities 0.2 and 0.6 have a standard deviation of 0.2; 0 and 1 one of 0.5; 1, 1 one of 0."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    nothing = torch.zeros(1, 3)
    views = {"mask_image": torch.tensor([[0.2, 0.0, 1.0]]).log(), "crop_image": torch.tensor([[0.6, 1.0, 1.0]]).log()}
    signals = columns_to_signals(signals_to_columns(RolloutSignals(nothing, nothing, mask, views=views)))
    options = PerturbationOptions(
        perturbation="mask_image", further_perturbations=["crop_image"], signals=["stability"]
    )
    assert add_named(named_signals(options), signals) == ["stability"]
    assert signals.extra["stability"][0].tolist() == pytest.approx([0.6, 0.0, 1.0])


def test_completions_behind_perturbed_images_of_their_own(vision_trainer, monkeypatch):
    """Prompts of a group are then alike in tokens alone, so none is shared in that pass: as without sharing."""
    options = {"max_steps": 1, "credit_rules": ["trajectory_scale"], "perturb_per": "completion", "learning_rate": 0.0}
    shared, plain = (rollout_of(vision_trainer(**options, share_prompts=share), monkeypatch) for share in ("on", "off"))
    assert torch.equal(shared.batch["completion_ids"], plain.batch["completion_ids"])
    valid = plain.signals.mask.bool()
    assert torch.allclose(shared.signals.dependency[valid], plain.signals.dependency[valid], rtol=1e-3, atol=1e-7)
    assert len({image.tobytes() for (image,) in shared.perturbed_images.values()}) == len(valid)


def test_a_pass_gets_the_pixels_of_its_own_groups_only(vision_trainer, monkeypatch):
    """And the dependency is that of all rows at once."""
    found, passes = [], []
    for rows, accumulated in ((8, 1), (4, 2)):
        run = vision_trainer(
            max_steps=1, credit_rules=["trajectory_scale"], per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulated, learning_rate=0.0,
        )  # fmt: skip
        scored = run.score

        def note(inputs, *more, scored=scored, **named):
            patches = int(inputs["image_grid_thw"].prod(-1).sum())
            passes.append((len(inputs["input_ids"]), patches == len(inputs["pixel_values"])))
            return scored(inputs, *more, **named)

        monkeypatch.setattr(run, "score", note)
        found.append(rollout_of(run, monkeypatch))
    assert passes == [(rows, True) for rows in (8, 8, 8, 4, 4)]  # each time first the scoring pass
    whole, parts = found
    valid = whole.signals.mask.bool()
    assert torch.equal(whole.batch["completion_ids"], parts.batch["completion_ids"])
    assert whole.signals.dependency[valid] == pytest.approx(parts.signals.dependency[valid], abs=1e-5)
    assert sorted(parts.perturbed_images) == list(range(8))
