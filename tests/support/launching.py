"""Several processes of one test, none of which outlives it."""

import inspect
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import psutil
import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
SECONDS = 900  # for what hangs; a machine that does much else must not reach it
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
ENGINES = {"ddp": {}, **{f"zero{n}": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(n)} for n in (2, 3)}}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
KINDS = ["ddp", *(pytest.param(f"zero{n}", marks=(needs_deepspeed, pytest.mark.minutes)) for n in (2, 3))]


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds what tests import, on one core."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody is given by chance while this block runs, and on which who is told its number can listen.

    Of two sockets that may reuse an address one may listen there, if the other does not; connections that go out, and
    servers that take any port, pass it over.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def launch(
    script: Path, *arguments: object, processes: int, status: int = 0, engine: Mapping[str, str] | None = None
) -> None:
    """Run a script in the processes of one group, as torchrun does but without its own start; all end with `status`.

    `engine`: what tells accelerate how the processes train together; None: DDP on a CPU.
    """
    engine = {"ACCELERATE_USE_CPU": "true"} if engine is None else engine
    command = [sys.executable, str(script), *map(str, arguments)]
    with ExitStack() as stack:
        port = str(stack.enter_context(held_port()))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        errors = [stack.enter_context(TemporaryFile("w+")) for _ in range(processes)]
        of_ranks = [environment(**engine, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(processes)]
        started = [
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=said)
            for env, said in zip(of_ranks, errors, strict=True)
        ]
        try:
            end = time.monotonic() + SECONDS
            while None in (ended := [process.poll() for process in started]) and time.monotonic() < end:
                if {*ended} - {None, 0}:  # the others wait for it in vain
                    end = min(end, time.monotonic() + 10)
                time.sleep(0.05)
        finally:
            for process in started:
                process.kill()
                process.wait()
        said = []
        for file in errors:
            file.seek(0)
            said.append(file.read()[-4000:])
        assert ended == [status] * processes, "\n".join([f"ended with {ended}", *said])


def results_of(function: Callable, *arguments: object, processes: int) -> list[Any]:
    with TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "call").write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, arguments)))
        launch(Path(__file__).with_name("worker.py"), folder, processes=processes)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(processes)]


def join_group() -> None:
    """Begin the group of the processes of `results_of`, where no trainer does; it is closed when they end."""
    from vgr_trl.patches.transformers import close_group_at_exit  # needs TRL, which most of what is tested so does not

    dist.init_process_group("gloo")
    close_group_at_exit()


def wait_for_line(run: subprocess.Popen, beginning: str) -> None:
    if not any(line.startswith(beginning) for line in run.stdout):
        pytest.fail(f"it ended before it said {beginning!r}: {run.communicate()[1][-3000:]}")


def children_of(run: subprocess.Popen) -> list[int]:
    return sorted(child.pid for child in psutil.Process(run.pid).children())


def outputs(*started: subprocess.Popen) -> list[tuple]:
    try:
        return [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            with process:
                process.kill()
