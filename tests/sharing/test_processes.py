"""Two processes on one machine, over gloo."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DEEPSPEED = find_spec("deepspeed") is not None


def run_two(worker):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(worker)), str(rank)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=180)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "worker",
    [
        pytest.param("process_worker.py", id="ddp and fsdp2"),
        pytest.param("trainer_worker.py", id="trl"),
        pytest.param("zero_worker.py", id="zero", marks=pytest.mark.skipif(not DEEPSPEED, reason="needs deepspeed")),
    ],
)
def test_gradients_and_steps_are_the_same(worker):
    outputs = run_two(worker)
    assert all(f"rank {rank} passed" in output for rank, output in enumerate(outputs)), "\n".join(outputs)
