"""Counts of shared prompts, features that are on or off, and the reasons for which calls run plainly."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class UnsupportedModel(Exception):
    """A call runs without sharing, for the reason in the message; raised and caught within this package."""


def require(condition: Any, otherwise: str) -> None:
    """Raise `UnsupportedModel` with the reason `otherwise` unless the condition holds."""
    if not condition:
        raise UnsupportedModel(otherwise)


@dataclass
class SharingReport:
    """Counts of the rows and prompts of all calls while sharing was on.

    Attributes:
        rows: rows of all forward passes and generations.
        prompts: prompts computed for these rows; as many as rows where nothing was shared.
        plain: reason -> number of calls that ran without sharing for this reason.
        in_training: (prompts, rows) of calls with the model in training mode.
    """

    rows: int = 0
    prompts: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    in_training: tuple[int, int] = (0, 0)

    @property
    def prompts_per_row(self) -> float:
        """Prompts computed per row, in (0, 1]; 1 / G where each prompt was shared by its G completions.

        Evaluation is left out: if the model was in training mode in some calls, only these calls count.
        """
        prompts, rows = self.in_training if self.in_training[1] else (self.prompts, self.rows)
        return prompts / rows if rows else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the prompts computed per row since the last call; empty without rows."""
        metrics = {"sharing/prompts_per_row": self.prompts_per_row} if self.rows else {}
        self.rows, self.prompts, self.in_training = 0, 0, (0, 0)
        return metrics

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.plain)})" if self.plain else ""
        return f"computed {self.prompts} prompts for {self.rows} rows{reasons}"

    def add(self, rows: int, prompts: int, plain: Iterable[str] = (), *, trains: bool = False) -> None:
        """Add the counts of a call.

        Args:
            rows: rows of the call.
            prompts: prompts computed for these rows.
            plain: reasons why the call ran without sharing.
            trains: whether the model is in training mode.
        """
        self.rows += rows
        self.prompts += prompts
        self.plain.update(plain)
        if trains:
            self.in_training = (self.in_training[0] + prompts, self.in_training[1] + rows)


@dataclass(frozen=True)
class Feature:
    """A feature of a run; printed as "on", or "off" with the reason.

    Attributes:
        reason: why the feature is off; None: it is on.
    """

    reason: str | None = None

    @property
    def enabled(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "on" if self.reason is None else f"off ({self.reason})"
