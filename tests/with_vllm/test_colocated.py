"""Training with a real, colocated vLLM, on a CPU; README.md says how to make the environment for it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
METRIC = "sampling/sampling_logp_difference/mean"  # vLLM's log-probabilities against those of the model being trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here: tests/with_vllm/README.md says how to make an environment with it.",
    ),
]


def steps_of_a_run(folder: Path, guard: str) -> dict:
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "colocated_run.py"), str(folder), guard],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "log.json").read_text())


def test_what_vllm_samples_is_what_the_model_says(tmp_path):
    """Prompts with one image, two and none; after each step vLLM has the new weights."""
    run = steps_of_a_run(tmp_path, "guarded")
    assert len(run["steps"]) == 3
    assert run["moved"] > 1e-3
    for step in run["steps"]:
        assert step[METRIC] < 5e-6
        assert {"attention/late/vgr", "rewards/vgr_reward/mean"} <= step.keys()
        assert step["token_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["token_weight_variance"] > 1e-6
    assert any(step["vgr/undefined_fraction"] > 0 for step in run["steps"]), "no batch had a prompt without images"


def test_without_the_guard_vllm_answers_another_prompt(tmp_path):
    """When this fails, TRL or vLLM has mended it, and `needs_collapsing` is to be narrowed."""
    run = steps_of_a_run(tmp_path, "unguarded")
    assert all(step[METRIC] > 1e-3 for step in run["steps"])
