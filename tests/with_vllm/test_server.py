"""Training with a real server of vLLM, on a CPU, and what becomes of a run whose server dies."""

import json
import re

import pytest
from running import NEEDS_VLLM, check_family, run
from support.commands import complete_checkpoints

pytestmark = NEEDS_VLLM


def test_a_server_that_dies_in_a_rollout_ends_the_run_and_a_new_one_continues_it(tmp_path):
    died = run(tmp_path, "qwen2_5_vl", "--server", "--dies")
    assert died.returncode != 0
    assert re.search(r"VLLMServerError: The vLLM server at \S+ did not answer", died.stderr), died.stderr[-4000:]
    assert [path.name for path in complete_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (1, 2, 3)]
    records = tmp_path / "rollouts" / "records-000001.jsonl"
    assert [json.loads(line)["step"] for line in records.read_text().splitlines()] == [0, 1, 2]
    assert not list(tmp_path.rglob("*.unfinished"))
    assert check_family(tmp_path, "qwen2_5_vl", "--server", "--resumes")["rows"] == 8


@pytest.mark.parametrize(("name", "flags"), [("smolvlm", ()), ("qwen2_5_vl", ("--tools", "--larger"))])
def test_a_server_reads_the_images_of_a_family(name, flags, tmp_path):
    """Tiles; images of tools in three turns. A run ends whose images take more tokens in the trainer."""
    found = check_family(tmp_path, name, "--server", *flags)
    assert found["rows"] >= (64 if flags else 24)
    if flags:
        assert found["refused"].startswith("vLLM reads a prompt with images as")
        assert "--mm-processor-kwargs" in found["refused"]
