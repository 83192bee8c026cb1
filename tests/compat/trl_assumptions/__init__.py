"""What ours relies on in TRL, read from its sources: one `Assumption` each, grouped by where TRL does it.

`reading.py` finds things in sources; `test_trl_source.py` above says what a release breaks, and which file of ours.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trl_assumptions.reading import TRAINER, UTILS, Source

__all__ = ["TRAINER", "UTILS", "Assumption", "Source"]


@dataclass(frozen=True)
class Assumption:
    """Something that TRL does.

    Attributes:
        says: what, in one sentence without a stop.
        ours: files of this library that rely on it, below `src/vgr_trl`.
        holds: whether sources do it.
        broken: a file of TRL, a text of it, and another in its place with which it does not hold.
    """

    says: str
    ours: str
    holds: Callable[[Source], bool]
    broken: tuple[str, str, str]
