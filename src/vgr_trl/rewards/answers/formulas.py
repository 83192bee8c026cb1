"""math-verify with a time limit, in the main thread and in others."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

_SECONDS = 3


@lru_cache(maxsize=1024)
def same_formula(gold: str, answer: str) -> bool:
    """Return whether math-verify takes the LaTeX formulas for equal; False if it cannot say within seconds.

    Args:
        gold: the right formula, without dollar signs.
        answer: the stated formula, without dollar signs.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    # math-verify times out by SIGALRM, which works in the main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    seconds: Any = _SECONDS if in_main_thread else None
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with nullcontext() if in_main_thread else _deadline(3 * _SECONDS, TimeoutException):
            parsed = [
                parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=seconds)
                for text in (gold, answer)
            ]
            return bool(verify(*parsed, timeout_seconds=seconds))
    except (Exception, TimeoutException):
        return False


@contextmanager
def _deadline(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` at the first call of a function in this thread after `seconds`."""
    end, previous = time.monotonic() + seconds, sys.getprofile()

    def check(frame: Any, event: str, argument: Any) -> None:
        if time.monotonic() > end:
            raise error

    sys.setprofile(check)
    try:
        yield
    finally:
        sys.setprofile(previous)
