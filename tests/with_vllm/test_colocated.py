"""Training with a real, colocated vLLM, on a CPU; README.md says how to make the environment for it."""

import pytest
from running import EXACT, METRIC, NEEDS_VLLM, outcome, run

pytestmark = NEEDS_VLLM


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
