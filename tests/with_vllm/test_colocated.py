"""Training with a real, colocated vLLM, on a CPU; README.md says how to make the environment for it."""

import pytest
from running import NEEDS_VLLM, check_family, run

pytestmark = NEEDS_VLLM
BFLOAT16 = 0.05  # of log-probabilities around -5, whose rounding is as large without images
AGREE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llava_next", "internvl", "idefics3",
    "smolvlm", "mistral3", "gemma4",
)  # fmt: skip


@pytest.mark.parametrize(("name", "flags"), [*((name, ()) for name in AGREE), ("qwen2_5_vl", ("--tools",))])
def test_a_family_with_none_one_and_several_images(name, flags, tmp_path):
    """Log-probabilities differ by rounding; with tools, in three turns whose rows have different numbers of images."""
    assert check_family(tmp_path, name, *flags)["rows"] >= (64 if flags else 24)


def test_qwen_3_5_with_none_one_and_several_images(tmp_path):
    check_family(tmp_path, "qwen3_5", most=BFLOAT16)


@pytest.mark.parametrize("name", ["idefics2", "ovis2"])
def test_a_family_that_vllm_does_not_serve(name, tmp_path):
    done = run(tmp_path, name)
    assert "ConfigError: The installed vLLM does not serve" in done.stderr, done.stderr[-2000:]
