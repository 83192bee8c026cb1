"""Rewards that do not come back: a limit of seconds, after which the run ends with the name of the function."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vgr_trl.errors import RewardError


class _TimeUp(BaseException):
    """No `Exception`, which a reward may catch."""


@contextmanager
def at_most(seconds: float | None, name: str) -> Iterator[None]:
    """Interrupt what this block waits for or computes in Python.

    Args:
        seconds: the limit, above 0; None: there is none, nor outside of the main thread, where Python takes no
            signals, or on Windows.
        name: of the reward, for the message.

    Raises:
        RewardError: the limit is reached.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, interrupt)
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
