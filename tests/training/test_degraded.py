from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from support.trainers import logged, tiny_model

from vgr_trl.errors import ConfigError
from vgr_trl.signals.perturbation import gaussian_blur
from vgr_trl.views.perturbed_pass import images_in

TAUGHT = {
    "teacher_view": "original", "teacher_weights": "reference", "loss_terms": ["teacher_divergence"],
    "reward_weights": [0.0],
}  # fmt: skip


def no_reward(completions, **columns):
    return [0.0] * len(completions)


def bytes_of(rollouts):
    return [[image.tobytes() for messages in rollout.messages for image in images_in(messages)] for rollout in rollouts]


@pytest.fixture
def build(vision_trainer, model_folder):
    def build(rewards=no_reward, **options):
        model = tiny_model(model_folder)
        model.config._name_or_path = str(model_folder)
        return vision_trainer(rewards, model=model, **TAUGHT | options)

    return build


def test_a_share_of_prompts_stays_and_the_teacher_sees_all_as_they_were(build, vision_trainer, rollouts):
    read = []

    def reward(completions, image, **columns):
        read.extend(image)
        return [0.0] * len(completions)

    run = build(
        reward, max_steps=2, per_device_train_batch_size=16, degraded_by="gaussian_blur", blur_radius=2.0,
        degraded_untouched=0.5, learning_rate=0.0, num_generations=2, shuffle_dataset=False,
        eval_strategy="steps", eval_steps=2, eval_rows=vision_trainer.rows.select(range(4)),
        per_device_eval_batch_size=4,
    )  # fmt: skip
    run.train()
    touched = []
    for rollout in rollouts:
        gaps = rollout.signals.views["teacher"] - rollout.signals.logps
        for row, messages in enumerate(rollout.messages):
            (shown,), (before,) = images_in(messages), rollout.rows[row]["original_images"]
            assert [image.tobytes() for image in rollout.teacher_images[row]] == [before.tobytes()]
            is_touched = shown.tobytes() != before.tobytes()
            assert shown.tobytes() == (gaussian_blur(before, radius=2.0) if is_touched else before).tobytes()
            largest = gaps[row][rollout.signals.mask[row].bool()].abs().max()
            assert (largest > 1e-4) == is_touched
            touched.append(is_touched)
    pairs = np.array(touched).reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all(), "completions of a prompt see one picture"
    assert 4 <= pairs[:, 0].sum() <= 12  # of 16
    trained, evaluated = read[: len(touched)], read[len(touched) :]
    assert [image.tobytes() for image in trained] == [each for of_rollout in bytes_of(rollouts) for each in of_rollout]
    data = {row["image"].tobytes() for row in vision_trainer.rows}
    assert evaluated
    assert all(image.tobytes() in data for image in evaluated)


def test_the_strength_grows_and_a_resumed_run_draws_the_same_pictures(build, rollouts):
    make = partial(
        build, max_steps=3, degraded_by="add_gaussian_noise", noise_std=40.0, degraded_from=0.5, save_strategy="steps",
        save_steps=1, shuffle_dataset=False,
    )  # fmt: skip
    run = make()
    run.train()
    assert logged(run, "degraded/strength") == [0.5, 0.75, 1.0]
    whole = bytes_of(rollouts)
    assert len({*whole[0], *whole[1]}) == 4, "two prompts a step, and no noise twice"
    stds = []
    for rollout in rollouts:
        (shown,), (before,) = images_in(rollout.messages[0]), rollout.rows[0]["original_images"]
        stds.append((np.asarray(shown).astype(float) - np.asarray(before)).std())
    assert stds[0] < stds[1] < stds[2]
    rollouts.clear()
    make().train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-1")
    assert bytes_of(rollouts) == whole[1:]


def test_grey_pictures_are_no_model_that_ignores_them(build):
    build(max_steps=1, degraded_by="mask_image", check_pixels=True).train()


def test_data_without_images_cannot_be_degraded(text_trainer):
    with pytest.raises(ConfigError, match="no images"):
        text_trainer(degraded_by="gaussian_blur")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_and_prompts_are_enough_with_one_completion_of_each(mode, build, rollouts, vision_trainer):
    """Several images of a row too, of other sizes; the teacher is an average that follows."""
    images = [image.convert(mode) for image in vision_trainer.rows["image"]]
    rows = [
        {"prompt": "what colour is the shape ?", "images": [image, image.resize((56, 28))][: 1 + number % 2]}
        for number, image in enumerate(images)
    ]
    run = build(
        rows=Dataset.from_list(rows), max_steps=2, num_generations=1, per_device_train_batch_size=3,
        degraded_by="compress_jpeg", jpeg_quality=1, sync_ref_model=True, ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.5, learning_rate=0.05, shuffle_dataset=False,
    )  # fmt: skip
    before = {name: value.clone() for name, value in run.ref_model.state_dict().items()}
    run.train()
    assert [len(rollout.messages) for rollout in rollouts] == [3, 3]
    for rollout in rollouts:
        for row, messages in enumerate(rollout.messages):
            sizes = [image.size for image in rollout.rows[row]["original_images"]]
            assert [image.size for image in images_in(messages)] == sizes
            assert len(sizes) == 1 + row % 2 or rollout is not rollouts[0]
    assert min(logged(run, "teacher_divergence")) > 0
    moved = [name for name, value in run.ref_model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert isinstance(rollouts[0].rows[0]["original_images"][0], Image.Image)
