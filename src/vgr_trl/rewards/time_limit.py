"""How long a reward may take; what it waits for other processes does not count."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vgr_trl.errors import RewardError

_INTERVAL = 0.1  # seconds between two looks at the clock, and between two interruptions
_running: "_Watchdog | None" = None


class _TimeUp(BaseException):
    """No `Exception`, which a reward may catch."""


class _Watchdog(threading.Thread):
    """Interrupts the main thread once the time is up, and again until it is stopped: the reward may catch everything.

    The signal is one that nothing else uses. SIGALRM is that of math-verify, and of a reward's own `signal.alarm`.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.end, self.time_is_up = time.monotonic() + seconds, False
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(_INTERVAL):
            if time.monotonic() >= self.end:
                self.time_is_up = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.time_is_up and not self.stopped.is_set():
            raise _TimeUp


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def at_most(seconds: float | None, name: str) -> Iterator[None]:
    """Interrupt what this block waits for or computes in Python, as often as it goes on.

    Not interrupted is a single call of C code that keeps the interpreter to itself: a regular expression, say.

    Args:
        seconds: the limit, above 0; None: there is none, nor outside of the main thread, where Python takes no
            signals.
        name: of the reward.

    Raises:
        RewardError: the limit is reached, whatever the block has made of the interruption.
    """
    global _running
    if seconds is None or not _is_main_thread():
        yield
        return
    watchdog = _running = _Watchdog(seconds)
    before = signal.signal(signal.SIGURG, watchdog.interrupt)
    watchdog.start()
    try:
        try:
            yield
        finally:
            watchdog.stopped.set()
    except BaseException:
        if not watchdog.time_is_up:
            raise
    finally:
        watchdog.stopped.set()  # the first time may have been interrupted
        signal.signal(signal.SIGURG, before)
        _running = None
    if watchdog.time_is_up:
        raise RewardError(
            f"The reward {name} has not returned within reward_timeout={seconds:g} seconds: correct it, or allow more."
        )


@contextmanager
def without_limit() -> Iterator[None]:
    """Let the limit stand still: while other processes are waited for, which have their own, or for cleaning up."""
    watchdog = _running if _is_main_thread() else None
    if watchdog is None:
        yield
        return
    began, end, watchdog.end = time.monotonic(), watchdog.end, float("inf")
    try:
        yield
    finally:
        watchdog.end = end + time.monotonic() - began
