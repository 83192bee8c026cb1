"""How the tests of this folder run a script that imports vLLM."""

import importlib.util
import json
import os
import subprocess
import sys
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
