"""Processes of a run: report lost processes, end workers with their parent, limit computing time."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType

from vgr_trl.errors import ProcessError

_LOST_PROCESS = re.compile(  # messages of gloo and NCCL
    "Timed out waiting|timed out after|Application timeout caused pair closure|Watchdog caught collective operation "
    "timeout|before timing out|Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    "ncclRemoteError|remote process exiting prematurely"
)


@contextmanager
def naming_silent_process(timeout: int, step: Callable[[], int]) -> Iterator[None]:
    """Convert the errors of gloo and NCCL about a silent process into a `ProcessError`.

    NCCL's watchdog may end the process itself, after the same time and with its own message.

    Args:
        timeout: `ddp_timeout`, in seconds.
        step: returns the current step, counted from 1.

    Raises:
        ProcessError: another process is silent or has ended.
    """
    try:
        yield
    except RuntimeError as error:
        from torch import distributed  # rewards and the report do without torch

        text = str(error)
        is_lost = ("gloo" in text or "NCCL" in text) and _LOST_PROCESS.search(text) is not None
        if not (is_lost and distributed.is_available() and distributed.is_initialized()):
            raise
        lost = f"has ended, or has not answered for ddp_timeout={timeout} seconds, at step {step()}"
        cure = "see its log, or set reward_timeout if a reward hangs, and continue with resume_from_checkpoint latest"
        raise ProcessError(f"Another of the {distributed.get_world_size()} processes {lost}: {cure}.") from error


def pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes that end with the process that started them, not before.

    A scheduler's SIGTERM, or Ctrl-C, reaches them as well, but their parent decides when they stop.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=exit_with_parent)


def initialise_loader(initialise: Callable[[int], None] | None, worker: int) -> None:
    """Make a data loader's worker end with the process that started it, then call the user's `worker_init_fn`.

    PyTorch's watchdog does not end a worker that waits on its full queue.
    """
    exit_with_parent()
    if initialise is not None:
        initialise(worker)


def kill_workers(executor: ProcessPoolExecutor) -> None:
    """Kill the processes of a pool, since the interpreter would wait for their work at exit."""
    for process in list((executor._processes or {}).values()):
        process.kill()


def exit_with_parent() -> None:
    """Make this worker ignore signals and exit with its parent process.

    A function ignores the signals: child processes would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def limit_seconds(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` after `seconds` of computing time in this block, in the main thread again every second.

    Computing time does not depend on other processes. Python handles signals in its main thread only; in others, each
    call of a Python function looks at the time. A single call of C code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        deadline, traced = time.thread_time() + seconds, sys.gettrace()

        def check(frame: FrameType, event: str, value: object) -> None:
            if time.thread_time() > deadline:
                raise error

        sys.settrace(check)
        try:
            yield
        finally:
            sys.settrace(traced)
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
