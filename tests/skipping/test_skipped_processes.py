"""Two processes of which one has fewer rows with a gradient, or none."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import outputs

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(f"zero{n}", marks=needs_deepspeed) for n in (2, 3))])
def test_steps_are_those_of_trl(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    if kind != "ddp":
        common |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[-1]}
        common |= {"DS_ACCELERATOR": "cpu"}
    worker = str(Path(__file__).with_name("rank_worker.py"))
    started = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), kind],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    found = [output for output, _ in outputs(*started)]
    assert all(f"rank {rank} passed" in output for rank, output in enumerate(found)), "\n".join(found)
