"""Processes that this one has work done in: none of them outlives it."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that import anew, and that end with the process that started them, not before.

    A scheduler's SIGTERM, or Ctrl-C, goes to them as well; what becomes of their work is for that process to say.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_belong_to_parent)


def kill_workers(executor: ProcessPoolExecutor) -> None:
    """End the processes of a pool in the midst of what they do, which the end of the interpreter would wait for."""
    for process in list((executor._processes or {}).values()):
        process.kill()


def _belong_to_parent() -> None:
    """End this process when the one that started it is killed, for then nobody sends it anything, not even an end.

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
