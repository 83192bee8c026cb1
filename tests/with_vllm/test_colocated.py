"""Training with a real, colocated vLLM, on a CPU; README.md says how to make the environment for it."""

import pytest
from running import EXACT, METRIC, NEEDS_VLLM, outcome, run

pytestmark = NEEDS_VLLM
BFLOAT16 = 0.05  # of log-probabilities around -5
AGREE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llava_next", "internvl", "idefics3",
    "smolvlm", "mistral3", "gemma4",
)  # fmt: skip


def test_what_vllm_samples_is_what_the_model_says(tmp_path):
    """Prompts with one image, two and none; after each step vLLM has the new weights."""
    found = outcome(tmp_path, run(tmp_path, "colocated_run.py"))
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


@pytest.mark.parametrize(("name", "flags"), [*((name, ()) for name in AGREE), ("qwen2_5_vl", ("--tools",))])
def test_a_family_with_none_one_and_several_images(name, flags, tmp_path):
    """Log-probabilities differ by rounding; with tools, in three turns whose rows have different numbers of images."""
    found = outcome(tmp_path, run(tmp_path, "family_run.py", name, *flags))
    assert found["same_tokens"]
    assert found["rows"] >= (64 if flags else 24)
    assert max(found["differences"].values()) < 2 * EXACT
    assert len(found["checked"]) == len(found["differences"].keys() - {"none"})


def test_qwen_3_5_with_none_one_and_several_images(tmp_path):
    """Rounding of bfloat16 is as large without images."""
    found = outcome(tmp_path, run(tmp_path, "family_run.py", "qwen3_5"))
    assert found["same_tokens"]
    assert max(found["differences"].values()) < BFLOAT16
    assert len(found["checked"]) == len(found["differences"].keys() - {"none"})


@pytest.mark.parametrize("name", ["idefics2", "ovis2"])
def test_a_family_that_vllm_does_not_serve(name, tmp_path):
    done = run(tmp_path, "family_run.py", name)
    assert "ConfigError: The installed vLLM does not serve" in done.stderr, done.stderr[-2000:]
