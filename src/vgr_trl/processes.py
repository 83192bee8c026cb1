"""Processes of a run: lost ones are named, workers end with their parent, computing time is limited."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType

from vgr_trl.errors import ProcessError

_LOST_PROCESS = re.compile(  # what gloo and NCCL say
    "Timed out waiting|timed out after|Application timeout caused pair closure|Watchdog caught collective operation "
    "timeout|before timing out|Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    "ncclRemoteError|remote process exiting prematurely"
)


@contextmanager
def naming_silent_process(timeout: int, step: Callable[[], int]) -> Iterator[None]:
    """Turn what gloo and NCCL raise when another process does not answer into a `ProcessError`.

    NCCL's watchdog may end the process itself, after the same time and with its own words.

    Args:
        timeout: `ddp_timeout`, in seconds.
        step: returns the step in work, counted from 1.

    Raises:
        ProcessError: another process is silent or has ended.
    """
    try:
        yield
    except RuntimeError as error:
        from torch import distributed  # rewards and processes of the report do without torch

        text = str(error)
        is_lost = ("gloo" in text or "NCCL" in text) and _LOST_PROCESS.search(text) is not None
        if not (is_lost and distributed.is_available() and distributed.is_initialized()):
            raise
        raise ProcessError(
            f"Another of the {distributed.get_world_size()} processes has ended, or has not answered for "
            f"ddp_timeout={timeout} seconds, at step {step()}: see what it logged last, or whether it hangs (in a "
            "reward, which reward_timeout names), end them all, and continue with resume_from_checkpoint latest."
        ) from error


def pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that import again, and that end with the process that started them, not before.

    A scheduler's SIGTERM, or Ctrl-C, goes to them as well; what becomes of their work is for that process to say.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=belong_to_parent)


def initialise_loader(initialise: Callable[[int], None] | None, worker: int) -> None:
    """Let a data loader's worker end with the process that started it, not before, then call its own `worker_init_fn`.

    PyTorch's watch of the parent does not end a worker that waits for its full queue to be read.
    """
    belong_to_parent()
    if initialise is not None:
        initialise(worker)


def kill_workers(executor: ProcessPoolExecutor) -> None:
    """End the processes of a pool in the midst of what they do, which the end of the interpreter would wait for."""
    for process in list((executor._processes or {}).values()):
        process.kill()


def belong_to_parent() -> None:
    """Exit with the parent process, or this worker hangs for ever.

    Signals are passed over by a function, since what this process starts would inherit that they are ignored.
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
    """Raise `error` when the process has computed for `seconds` in this block, and again should it be caught.

    The limit is of computing time, so that it does not depend on what else runs. Python handles signals in its main
    thread alone: in other threads there is no limit. A single call of C code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
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
