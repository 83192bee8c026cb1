"""What prompt sharing did: how many prompts stood for how many rows, and why some calls were left as they are."""

from collections import Counter
from dataclasses import dataclass, field


class CannotShare(Exception):
    """Raised inside this room only: this call runs plainly, for the reason given as a message."""


@dataclass
class SharingReport:
    """Counts over the calls made while sharing was on.

    Attributes:
        rows: rows of all forward passes and generations that could have been shared.
        prompts: prompts that were computed for them; equal to `rows` where nothing was shared.
        plain: reason -> number of calls that ran plainly because of it.
    """

    rows: int = 0
    prompts: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    @property
    def prompts_per_row(self) -> float:
        """Prompts computed per row, in (0, 1]; 1 / G where all G completions of each prompt were shared."""
        return self.prompts / self.rows if self.rows else 1.0

    def add_shared(self, rows: int, prompts: int) -> None:
        """Count a call with `rows` rows that computed `prompts` prompts."""
        self.rows += rows
        self.prompts += prompts

    def add_plain(self, rows: int, reason: str) -> None:
        """Count a call with `rows` rows that ran plainly for `reason`."""
        self.add_shared(rows, rows)
        self.plain[reason] += 1

    def add(self, other: "SharingReport") -> None:
        """Count the calls of another report too."""
        self.add_shared(other.rows, other.prompts)
        self.plain.update(other.plain)
