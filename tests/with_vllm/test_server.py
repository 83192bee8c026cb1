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
from running import EXACT, HERE, METRIC, NEEDS_VLLM, SECONDS, environment
from support.checkpoints import complete_checkpoints

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    code = f"import sys, pathlib; sys.path.insert(0, {str(HERE)!r}); import tiny_run; "
    code += f"tiny_run.saved_model(pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=SECONDS)
    return folder / "model"


@contextmanager
def served(model: Path, log: Path, port: int) -> Iterator[tuple[str, int]]:
    """A server that `trl vllm-serve` has started: its address, and its group of processes."""
    flags = (
        f"vllm-serve --model {model} --host 127.0.0.1 --port {port} --dtype float32 --enforce_eager true "
        "--max_model_len 256 --worker-extension-cls plain_weights.WeightsFromFile"
    )
    with log.open("w") as output:
        server = subprocess.Popen(
            [Path(sys.executable).with_name("trl"), *flags.split()],
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
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


def train(folder: Path, url: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(HERE / "server_run.py"), str(folder), url, *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def steps_of(folder: Path, done: subprocess.CompletedProcess) -> list[dict]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "log.json").read_text())["steps"]


def check(steps: list[dict]) -> None:
    for step in steps:
        assert step[METRIC] < EXACT
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert {"attention/late/vgr", "replay/size", "token_weight_variance"} <= step.keys()


def test_a_server_answers_with_the_weights_of_each_step(model, tmp_path, port):
    with served(model, tmp_path / "server.log", port) as (url, _):
        steps = steps_of(tmp_path, train(tmp_path, url))
    assert len(steps) == 3
    check(steps)


def test_a_server_that_dies_in_a_rollout_ends_the_run_and_a_new_one_continues_it(model, tmp_path, port):
    with served(model, tmp_path / "server.log", port) as (url, pid):
        died = train(tmp_path, url, "--die", str(pid), "2")
    assert died.returncode != 0
    assert re.search(r"VLLMServerError: The vLLM server at \S+ did not answer", died.stderr), died.stderr[-4000:]
    assert [each.name for each in complete_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    records = tmp_path / "rollouts" / "records-000001.jsonl"
    assert [json.loads(line)["step"] for line in records.read_text().splitlines()] == [0, 1]
    assert not list(tmp_path.rglob("*.unfinished"))
    with served(model, tmp_path / "again.log", port) as (url, _):
        steps = steps_of(tmp_path, train(tmp_path, url, "--resume"))
    assert len(steps) == 3
    check(steps)
