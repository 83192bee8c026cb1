"""The end of a process of several: its group is closed while the interpreter still runs.

Gloo frees a finished collective in a thread of its own, which needs the interpreter's lock. After the interpreter has
shut down that thread is ended in the middle of it (`terminate called without an active exception`, pytorch/pytorch
#190489); while the lock is held by whoever destroys the group, both wait forever. The thread outlives a group that
was destroyed but is still referred to, as by DDP and DeepSpeed. Removable when torch waits for it.
"""

import atexit
import sys
import time

from torch import distributed


def close_group_at_exit() -> None:
    """Close the process group there is when this process ends by itself; if it was closed before, let gloo finish."""
    atexit.unregister(_close)
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close)


def let_gloo_finish() -> None:
    """Let go of the interpreter's lock until gloo has freed the last collective, so that the group can be destroyed."""
    time.sleep(0.2)


def _close() -> None:
    let_gloo_finish()
    failed = getattr(sys, "last_value", None) is not None  # a collective may be pending then, for ever
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()
