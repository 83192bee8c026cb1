"""The end of a process of several: its group is closed while the interpreter still runs.

Gloo frees a finished collective in a thread of its own, which needs the interpreter's lock. After the interpreter has
shut down that thread is ended in the middle of it (`terminate called without an active exception`, pytorch/pytorch
#190489); while the lock is held by whoever destroys the group, both wait forever. The thread outlives a group that
was destroyed but is still referred to, as by DDP and DeepSpeed. Removable when torch waits for it.
"""

import atexit
import sys
import time
from pathlib import Path

from torch import distributed

_THREADS = Path("/proc/self/task")  # of Linux
_NAME = "pt_gloo_runloop"
_SEEN = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_SECONDS = 0.1  # between two looks
_MOST = 60.0


def close_group_at_exit() -> None:
    """Close the process group there is when this process ends by itself; if it was closed before, let gloo finish."""
    atexit.unregister(_close)
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close)


def let_gloo_finish() -> None:
    """Let go of the interpreter's lock until gloo has freed the last collective, so that the group can be destroyed.

    Its threads are at rest then: they sleep, and between two looks none was woken, as one is that waits for the lock.
    Where threads cannot be looked at the time of two looks has to do.
    """
    end = time.monotonic() + _MOST
    before: list[str] | None = None
    while time.monotonic() < end:
        time.sleep(_SECONDS)
        now = _what_threads_did()
        if now == before and not any(line.startswith("State:") and "sleeping" not in line for line in now):
            return
        before = now


def _what_threads_did() -> list[str]:
    """Of each of gloo's threads whether it sleeps, and how often it was given and lost a core."""
    found: list[str] = []
    for status in sorted(_THREADS.glob("*/status")):
        try:
            name, *lines = status.read_text().splitlines()
        except OSError:  # it has ended
            continue
        if name.endswith(_NAME):
            found += [line for line in lines if line.startswith(_SEEN)]
    return found


def _close() -> None:
    let_gloo_finish()
    failed = getattr(sys, "last_value", None) is not None  # a collective may be pending then, for ever
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()
