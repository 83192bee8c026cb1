"""Warnings on the terminal: each of them once, so that the lines of the steps are seen."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RENAMED = r"`\w*gradient_checkpointing\w*` is deprecated"  # by transformers 5.23, and TRL 1.16 calls it at every step


@contextmanager
def warnings_once() -> Iterator[None]:
    """Show a warning of the same place and text once, and none that asks TRL to call something by its later name.

    Python itself forgets what it has shown whenever a filter changes, which TRL does at every step.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
        show, shown = warnings.showwarning, set()

        def show_new(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            known = (str(message), filename, lineno)
            if known not in shown:
                shown.add(known)
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_new
        yield
