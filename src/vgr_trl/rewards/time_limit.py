"""How long a reward may take; what it waits for other processes does not count."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vgr_trl.errors import RewardError

_counts = False  # whether the timer is that of this file


class _TimeUp(BaseException):
    """No `Exception`, which a reward may catch."""


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def at_most(seconds: float | None, name: str) -> Iterator[None]:
    """Interrupt what this block waits for or computes in Python.

    Args:
        seconds: the limit, above 0; None: there is none, nor outside of the main thread, where Python takes no
            signals, or on Windows.
        name: of the reward.

    Raises:
        RewardError: the limit is reached.
    """
    global _counts
    if seconds is None or not _is_main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TimeUp

    before, _counts = signal.signal(signal.SIGALRM, interrupt), True
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeUp:
        raise RewardError(
            f"The reward {name} has not returned within reward_timeout={seconds:g} seconds: mend it, or allow more."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _counts = False


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Let the limit stand still while other processes are waited for: each of them has one of its own."""
    left = signal.setitimer(signal.ITIMER_REAL, 0)[0] if _counts and _is_main_thread() else 0.0
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)
