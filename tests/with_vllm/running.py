"""How the tests of this folder run a script that imports vLLM."""

import importlib.util
import json
import os
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

HERE = Path(__file__).parent
METRIC = "sampling/sampling_logp_difference/mean"  # vLLM's log-probabilities against those of the model being trained
EXACT = 5e-6  # of log-probabilities: float32 on both sides
SECONDS = 900  # for what hangs

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: tests/with_vllm/README.md says how to make an environment with it.",
)


def environment() -> dict[str, str]:
    paths = [str(HERE / "site"), str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    of_vllm = {"CPU_KVCACHE_SPACE": "1", "CPU_OMP_THREADS_BIND": "nobind", "LOGGING_LEVEL": "WARNING"}  # GiB
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    more |= {f"VLLM_{name}": value for name, value in of_vllm.items()}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def run(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(HERE / script), str(folder), *flags]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS)


def outcome(folder: Path, done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "log.json").read_text())


@contextmanager
def served(model: Path, log: Path, port: int, length: int = 256, dtype: str = "float32") -> Iterator[tuple[str, int]]:
    """A server that `trl vllm-serve` has started: its address, and its group of processes."""
    flags = (
        f"vllm-serve --model {model} --host 127.0.0.1 --port {port} --dtype {dtype} --enforce_eager true "
        f"--max_model_len {length} --worker-extension-cls plain_weights.WeightsFromFile"
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
