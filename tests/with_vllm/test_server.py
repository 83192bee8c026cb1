"""Training with a real server of vLLM, on a CPU, and what becomes of a run whose server dies."""

import json
import re
from pathlib import Path

import pytest
from running import EXACT, METRIC, NEEDS_VLLM, outcome, run, served
from support.commands import complete_checkpoints

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    run(folder, "tiny_run.py").check_returncode()
    return folder / "model"


def check(folder: Path, url: str, *flags: str) -> None:
    steps = outcome(folder, run(folder, "server_run.py", url, *flags))["steps"]
    assert len(steps) == 3
    for step in steps:
        assert step[METRIC] < EXACT
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert {"attention/late/vgr", "replay/size", "token_weight_variance"} <= step.keys()


def test_a_server_answers_with_the_weights_of_each_step(model, tmp_path, port):
    with served(model, tmp_path / "server.log", port) as (url, _):
        check(tmp_path, url)


def test_a_server_that_dies_in_a_rollout_ends_the_run_and_a_new_one_continues_it(model, tmp_path, port):
    with served(model, tmp_path / "server.log", port) as (url, pid):
        died = run(tmp_path, "server_run.py", url, "--die", str(pid), "2")
    assert died.returncode != 0
    assert re.search(r"VLLMServerError: The vLLM server at \S+ did not answer", died.stderr), died.stderr[-4000:]
    assert [each.name for each in complete_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    records = tmp_path / "rollouts" / "records-000001.jsonl"
    assert [json.loads(line)["step"] for line in records.read_text().splitlines()] == [0, 1]
    assert not list(tmp_path.rglob("*.unfinished"))
    with served(model, tmp_path / "again.log", port) as (url, _):
        check(tmp_path, url, "--resume")


@pytest.mark.parametrize(("name", "flags"), [("smolvlm", ()), ("qwen2_5_vl", ("--tools", "--larger"))])
def test_a_server_reads_the_images_of_a_family(name, flags, tmp_path):
    """Tiles; images of tools in three turns. A run ends whose images take more tokens in the trainer."""
    found = outcome(tmp_path, run(tmp_path, "family_run.py", name, "--server", *flags))
    assert found["same_tokens"]
    assert found["rows"] >= (64 if flags else 24)
    assert max(found["differences"].values()) < 2 * EXACT
    assert len(found["checked"]) == len(found["differences"].keys() - {"none"})
    if flags:
        assert found["refused"].startswith("vLLM reads a prompt with images as")
        assert "--mm-processor-kwargs" in found["refused"]
