"""The dependency under several perturbations: one pass, and what each of them alone gives."""

import pytest
import torch
from datasets import load_dataset
from transformers import Qwen2_5_VLForConditionalGeneration

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor
from vgr_trl.errors import ConfigError
from vgr_trl.training.perceive import perceive

VIEWS = ("mask_image", "gaussian_blur", "blacken_patches")


def letters_reward(completions, **kwargs):
    return [sum(map(ord, completion[0]["content"])) % 7 / 7 for completion in completions]


def test_each_view_alone_and_all_at_once(model_folder, question_files, tmp_path, monkeypatch):
    """Within one rollout, mean and minimum of what three runs of the pass give, each with one perturbation."""
    file = question_files.split(",")[0].removeprefix("train=")
    questions, _ = prepare_rows(load_dataset("parquet", data_files=file, split="train"), system_prompt=None)
    config = DAPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=4, max_steps=1, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, credit_rules=["trajectory_scale"], perturbation=VIEWS[0],
        further_perturbations=list(VIEWS[1:]),
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    run = DAPOTrainer(model, letters_reward, config, questions, processing_class=load_processor(model_folder))
    found, passes, scored = {}, [], run.host.score

    def score(inputs, *args, **options):
        passes.append(len(inputs["input_ids"]))
        return scored(inputs, *args, **options)

    def measured(rollout, host, measurement):
        for name in VIEWS:
            config.perturbation, config.further_perturbations = name, None
            found[name] = perceive(rollout, host, measurement).signals.dependency
        config.perturbation, config.further_perturbations = VIEWS[0], list(VIEWS[1:])
        monkeypatch.setattr(run.host, "score", score)
        for config.dependency_over in ("mean", "min"):
            found[config.dependency_over] = perceive(rollout, host, measurement).signals.dependency
        found["images"] = rollout.perturbed_images
        return rollout

    monkeypatch.setattr("vgr_trl.trainer.perceive", measured)
    run.train()
    each = torch.stack([found[name] for name in VIEWS])
    assert each.std(0).max() > 1e-7, "the views differ"
    torch.testing.assert_close(found["mean"], each.mean(0))
    torch.testing.assert_close(found["min"], each.amin(0))
    assert passes == [24, 24], "8 rows in 3 views, in one pass"
    assert found["images"][0][0].getcolors() == [(found["images"][0][0].width ** 2, (128, 128, 128))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"further_perturbations": ["blacken_patches"]}, "further_perturbations is .*: give each perturbation once"),
        ({"further_perturbations": ["darken"]}, "There is no perturbation 'darken'"),
        ({"dependency_over": "max"}, "dependency_over is 'max': give mean or min"),
    ],
)
def test_views_that_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        DAPOConfig(str(tmp_path), use_cpu=True, **options)
