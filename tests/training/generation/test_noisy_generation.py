from copy import copy
from dataclasses import replace

import pytest
import torch
from support.trainers import emitted, letters_reward, logged

from vgr_trl.config import NoisyOptions
from vgr_trl.views import perturbed_pass as noisy

NOISE = {"noisy_generations": 3, "max_steps": 1}


@pytest.fixture
def make(vision_trainer):
    return lambda **options: vision_trainer(letters_reward, **NOISE | options)


def trained(run, monkeypatch):
    """The pixels that are generated from, those of each training pass, and the rollout once it is judged."""
    seen, batches, rollouts = [], [], []
    generate, finish = run.model.generate, noisy.record_noise
    loss = run._loss_of_part

    def keep(run, rollout, weights):
        finish(run, rollout, weights)
        rollouts.append(copy(rollout))

    monkeypatch.setattr(run.model, "generate", lambda **inputs: seen.append(inputs) or generate(**inputs))
    monkeypatch.setattr(run, "_loss_of_part", lambda model, inputs: batches.append(inputs) or loss(model, inputs))
    monkeypatch.setattr("vgr_trl.trainer.record_noise", keep)
    run.train()
    return seen[0], batches, rollouts[0]


def rows_of(pixels, grid):
    return pixels.split(grid.prod(-1).tolist())


def test_the_last_of_each_group_are_sampled_from_noise_and_all_train_on_the_image(make, monkeypatch):
    run = make(diffusion_steps=800)
    generated, batches, rollout = trained(run, monkeypatch)
    clean = run.run.tokenize(rollout.messages)
    grid = generated["image_grid_thw"]
    shown = rows_of(generated["pixel_values"], grid)
    expected = rows_of(torch.as_tensor(clean.fields["pixel_values"]), grid)
    same = [torch.equal(one, other) for one, other in zip(shown, expected, strict=True)]
    assert same == [True, False, False, False] * 2
    assert torch.equal(shown[1], shown[2]), "one perturbed image for a prompt"
    assert rollout.noise.rows == [False, True, True, True] * 2
    assert torch.equal(rollout.batch.images.tensors["pixel_values"], torch.cat(expected))
    trained_on = torch.cat([batch.images.tensors["pixel_values"] for batch in batches])
    clean_rows = {one.numpy().tobytes() for one in expected}
    assert {one.numpy().tobytes() for one in rows_of(trained_on, grid)} == clean_rows
    assert rollout.batch.old_logps is None, "as published, the ratio of the first pass is 1"
    assert list(run._logs["extra"]["noisy"]) == rollout.noise.rows
    rewards = run._logs["rewards"]["letters_reward"]
    of_noise = [value for row, value in enumerate(rewards) if row % 4]
    assert logged(run, "noisy/reward") == [pytest.approx(sum(of_noise) / 6)]
    assert logged(run, "noisy/reward_clean") == [pytest.approx((rewards[0] + rewards[4]) / 2)]
    assert (logged(run, "noisy/generations"), logged(run, "noisy/strength")) == ([3.0], [1.0])


def test_the_ratio_to_the_policy_that_generated(make, monkeypatch):
    """Old log-probabilities are those given the pixels that each row was generated from."""
    run = make(
        noisy_importance="perturbed", diffusion_steps=900, learning_rate=0.0, signals=["logps"],
        steps_per_generation=2, per_device_train_batch_size=4,
    )  # fmt: skip
    generated, batches, rollout = trained(run, monkeypatch)
    batch = rollout.batch
    with torch.no_grad():
        logits = emitted(run.model, replace(batch, images=batch.images.with_pixels(generated["pixel_values"])))
    logps = (logits / run.temperature).log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    valid = batch.completion_mask.bool()
    old = batch.old_logps
    assert torch.allclose(old[valid], logps[valid], atol=1e-5)
    clean = rollout.signals.logps
    assert torch.allclose(old[[0, 4]][valid[[0, 4]]], clean[[0, 4]][valid[[0, 4]]], atol=1e-5)
    assert (old - clean)[[1, 2, 3]][valid[[1, 2, 3]]].abs().max() > 1e-3
    read = torch.cat([part.old_logps.flatten() for part in batches])
    assert not read.isnan().any()


@pytest.mark.parametrize(
    ("kind", "coefficient", "expected"),
    [  # recorded from NoisyRollout's code at steps 1, 20, 40, 60 and 100 of 100
        ("sigmoid", 30.0, [0.9999917062496261, 0.9975273768433652, 0.5, 0.002472623156634657, 1.5229979499764568e-08]),
        ("exponential", 0.95, [0.9937678639785958, 0.9834846256149864, 0.953930201013048, 0.8714878434348969, 0.0]),
        ("power", 2.0, [0.9999, 0.96, 0.84, 0.64, 0.0]),
        ("linear", 30.0, [0.99, 0.8, 0.6, 0.4, 0.0]),
        ("none", 30.0, [1.0] * 5),
    ],
)
def test_decays_as_published(kind, coefficient, expected):
    options = NoisyOptions(noisy_decay=kind, noisy_decay_coef=coefficient, noisy_decay_midpoint=40)
    left = [options.noise_left(step, 100) for step in (1, 20, 40, 60, 100)]
    assert left == pytest.approx(expected, rel=1e-9, abs=1e-15)
