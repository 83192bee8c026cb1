"""Faults of process groups: each with its link, and what makes the repair removable."""

import atexit
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

# `ddp_timeout` on a CPU, where transformers 5.23 does not hand it to the process group: it stays at 30 minutes.


def give_timeout(seconds: int) -> None:
    """Let processes that talk by gloo wait for each other as long as `ddp_timeout` says."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        _set_pg_timeout(timedelta(seconds=seconds))


# The end of a process of several: its group is closed while the interpreter still runs.
#
# Gloo frees a finished collective in a thread of its own, which needs the interpreter's lock. After the interpreter
# has shut down that thread is ended in the middle of it (`terminate called without an active exception`,
# pytorch/pytorch #190489); while the lock is held by whoever destroys the group, both wait forever. The thread
# outlives a group that was destroyed but is still referred to, as by DDP and DeepSpeed. Removable when torch waits
# for it.

_STATUS_LINES = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_SECONDS, _MOST = 0.1, 60.0  # between two looks at the threads, and in all


def close_group_at_exit() -> None:
    """Close the process group there is when this process ends by itself; if it was closed before, let gloo finish."""
    atexit.unregister(_close)
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close)


def wait_for_gloo() -> None:
    """Let go of the interpreter's lock until gloo has freed the last collective, so that the group can be destroyed.

    Its threads are at rest then: they sleep, and between two looks none was woken, as one is that waits for the lock.
    Where threads cannot be looked at the time of two looks has to do.
    """
    before: list[str] | None = None
    for _ in range(int(_MOST / _SECONDS)):
        time.sleep(_SECONDS)
        now = _gloo_thread_states()
        if now == before and not any(line.startswith("State:") and "sleeping" not in line for line in now):
            return
        before = now


def _gloo_thread_states() -> list[str]:
    """Return for each of gloo's threads (Linux) whether it sleeps, and how often it was scheduled."""
    found: list[str] = []
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        with suppress(OSError):  # it has ended
            name, *lines = status.read_text().splitlines()
            if name.endswith("pt_gloo_runloop"):
                found += [line for line in lines if line.startswith(_STATUS_LINES)]
    return found


def _close() -> None:
    wait_for_gloo()
    failed = getattr(sys, "last_value", None) is not None  # a collective may be pending then, for ever
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()
