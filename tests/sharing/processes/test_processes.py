"""Two processes on one machine, over gloo."""

import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import environment, outputs

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def run_two(worker, *arguments, **more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**environment(**more), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(worker)), str(rank), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    return [output for output, _ in outputs(*workers)]


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["process_worker.py", pytest.param("zero_worker.py", marks=needs_deepspeed)])
def test_gradients_are_the_same(worker):
    outputs = run_two(worker)
    assert all(f"rank {rank} passed" in output for rank, output in enumerate(outputs)), "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(f"zero{n}", marks=needs_deepspeed) for n in (2, 3))])
def test_steps_of_the_trainer_are_the_same(kind):
    stage = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[-1], "DS_ACCELERATOR": "cpu"}
    outputs = run_two("trainer_worker.py", kind, **({} if kind == "ddp" else stage))
    assert all(f"rank {rank} passed" in output for rank, output in enumerate(outputs)), "\n".join(outputs)
