"""Training with a real server of vLLM, on a CPU, and what becomes of a run whose server dies."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import killpg
from pathlib import Path

import pytest
from running import EXACT, METRIC, NEEDS_VLLM, SECONDS, environment, outcome, run
from support.commands import complete_checkpoints

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    run(folder, "tiny_run.py").check_returncode()
    return folder / "model"


@contextmanager
def served(model: Path, log: Path, port: int) -> Iterator[tuple[str, int]]:
    flags = (
        f"vllm-serve --model {model} --host 127.0.0.1 --port {port} --dtype float32 --enforce_eager true "
        "--max_model_len 256 --worker-extension-cls plain_weights.WeightsFromFile"
    )
    command = [Path(sys.executable).with_name("trl"), *flags.split()]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + SECONDS
        while not answers(url):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url, server.pid
    finally:
        with suppress(ProcessLookupError):
            killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


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
