"""Training with a real, colocated vLLM, on a CPU; README.md says how to make the environment for it."""

from pathlib import Path

import pytest
from running import EXACT, METRIC, NEEDS_VLLM, outcome

pytestmark = [pytest.mark.slow, NEEDS_VLLM]


def run(folder: Path, case: str) -> dict:
    return outcome(folder, "colocated_run.py", case)


def test_what_vllm_samples_is_what_the_model_says(tmp_path):
    """Prompts with one image, two and none; after each step vLLM has the new weights."""
    found = run(tmp_path, "guarded")
    assert len(found["steps"]) == 3
    for step in found["steps"]:
        assert step[METRIC] < EXACT
        assert {"attention/late/vgr", "rewards/vgr_reward/mean"} <= step.keys()
        assert step["token_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["token_weight_variance"] > 1e-6
    assert any(step["vgr/undefined_fraction"] > 0 for step in found["steps"]), "no batch had a prompt without images"
    assert {images for call in found["calls"] for images in call["images"]} == {0, 1, 2}
    assert [call["behind"] for call in found["calls"]] == [0.0] * 3
    moves = [call["since_start"] for call in found["calls"]]
    assert moves[0] == 0 < moves[1] < moves[2], "vLLM got the same weights again"


def test_without_the_guard_vllm_answers_another_prompt(tmp_path):
    """When this fails, TRL or vLLM has fixed it, and `needs_collapsing` has to ask for the release."""
    found = run(tmp_path, "unguarded")
    assert all(step[METRIC] > 1e-3 for step in found["steps"])


def test_images_that_come_again_are_seen_with_the_new_weights(tmp_path):
    """Three prompts, each in every step."""
    found = run(tmp_path, "again")
    assert all({*call["images"]} == {0, 1, 2} for call in found["calls"])
    assert all(step[METRIC] < EXACT for step in found["steps"])


def test_an_adapter_reaches_vllm_merged(tmp_path):
    found = run(tmp_path, "lora")
    assert all(step[METRIC] < EXACT for step in found["steps"])


def test_every_feature_with_the_correction_on(tmp_path):
    found = run(tmp_path, "everything")
    assert len(found["steps"]) == 4
    for step in found["steps"]:
        assert step[METRIC] < EXACT
        ratios = [step[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")]
        assert ratios == pytest.approx([1.0] * 3, abs=1e-4)
        assert step["perception_loss"] != 0
    assert max(step["replay/replaced_fraction"] for step in found["steps"]) > 0, "nothing was replayed"
    assert len((tmp_path / "rollouts" / "records-000001.jsonl").read_text().splitlines()) == 4


def test_noisy_generations_are_drawn_from_the_perturbed_images(tmp_path):
    """vLLM's log-probabilities are those given the perturbed image, and of the other rows those given the clean one."""
    found = run(tmp_path, "noisy")
    assert len(found["calls"]) == 3
    for call in found["calls"]:
        assert call["num_generations"] == 1
        assert max(call["from_seen"]) < 10 * EXACT
        noisy = [row % 4 >= 2 and images > 0 for row, images in enumerate(call["images"])]
        assert any(noisy)
        for is_noisy, distance in zip(noisy, call["from_clean"], strict=True):
            assert (distance > 1e-3) if is_noisy else (distance < 10 * EXACT)


def test_blind_answers_are_asked_without_images(tmp_path):
    found = run(tmp_path, "blind")
    seeing, blind = found["calls"][::2], found["calls"][1::2]
    assert len(seeing) == len(blind) == 3
    assert all(call["images"] is not None for call in seeing)
    for call in blind:
        assert call["images"] is None
        assert call["num_generations"] == 1
        assert call["behind"] == 0
        assert call["difference"] < 10 * EXACT
    for step in found["steps"]:
        assert step[METRIC] < EXACT
        assert step["blind/described"] == 1
        assert 0 <= step["rewards/blind_accuracy_reward/mean"] <= 1
