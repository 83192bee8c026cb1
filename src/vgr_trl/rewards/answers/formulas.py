"""math-verify with a limit of computing time, in the main thread and in others."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

_SECONDS = 5.0


@lru_cache(maxsize=1024)
def same_formula(gold: str, answer: str) -> bool:
    """Return whether math-verify takes the LaTeX formulas for equal; False if it has to compute for more than seconds.

    Args:
        gold: the right formula, without dollar signs.
        answer: the stated formula, without dollar signs.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _limit()(_SECONDS, TimeoutException):
            parsed = [
                parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
                for text in (gold, answer)
            ]
            return bool(verify(*parsed, timeout_seconds=None))
    except (Exception, TimeoutException):
        return False


def _limit() -> Any:
    """What limits a block of this thread: its computing time, so that a reward does not depend on what else runs.

    math-verify's own limit is of time that passes, and no other may be set beside it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return _by_signal if is_main and hasattr(signal, "setitimer") else _by_profile


@contextmanager
def _by_signal(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` when the process has computed for `seconds` in this block, and again should it be caught."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _by_profile(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` at the first call of a function after this thread has computed for `seconds` in this block."""
    soonest, end, previous = time.monotonic() + seconds, time.thread_time() + seconds, sys.getprofile()

    def check(frame: Any, event: str, argument: Any) -> None:
        if time.monotonic() > soonest and time.thread_time() > end:
            raise error

    sys.setprofile(check)
    try:
        yield
    finally:
        sys.setprofile(previous)
