"""How the tests of this folder run `family_run.py`, which imports vLLM, and how it starts a server."""

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
from support.launching import held_port

HERE = Path(__file__).parent
EXACT = 1e-5  # of the largest log-probability: float32 on both sides
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


def run(folder: Path, name: str, *flags: str) -> subprocess.CompletedProcess:
    """Run the training of a family."""
    command = [sys.executable, str(HERE / "family_run.py"), str(folder), name, *flags]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS)


def check_family(folder: Path, name: str, *flags: str, most: float = EXACT) -> dict:
    """Run a family, check that vLLM reads the tokens of the trainer and samples as it does; return what was found."""
    done = run(folder, name, *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((folder / "log.json").read_text())
    assert found["same_tokens"]
    assert max(found["differences"].values()) < most
    assert len(found["checked"]) == len(found["differences"].keys() - {"none"})
    assert max(found["gradients"][:-1]) > 0, "vLLM got the same weights again"
    return found


@contextmanager
def served(model: Path, log: Path, dtype: str) -> Iterator[tuple[str, int]]:
    """A server that `trl vllm-serve` has started: its address, and its group of processes."""
    with held_port() as port, log.open("w") as output:
        url = f"http://127.0.0.1:{port}"
        flags = (
            f"vllm-serve --model {model} --host 127.0.0.1 --port {port} --dtype {dtype} --enforce_eager true "
            f"--max_model_len 1024 --worker-extension-cls plain_weights.WeightsFromFile"
        )
        command, pipes = [Path(sys.executable).with_name("trl"), *flags.split()], {"stdout": output, "stderr": output}
        server = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
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
