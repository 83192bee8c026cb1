"""Counts of shared prompts, and the reasons for which calls run plainly."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


class UnsupportedModel(Exception):
    """Raised inside this package only: this call runs plainly, for the reason given as a message."""


def require(condition: Any, otherwise: str) -> None:
    """Raise `UnsupportedModel` with the reason `otherwise` unless a condition holds."""
    if not condition:
        raise UnsupportedModel(otherwise)


def why_unsupported(check: Callable[..., Any], *args: Any) -> str | None:
    """Return the reason for which a check raises `UnsupportedModel`; None if it passes."""
    try:
        check(*args)
    except UnsupportedModel as error:
        return str(error)
    return None


@dataclass
class SharingReport:
    """Counts over the calls made while sharing was on.

    Attributes:
        rows: rows of all forward passes and generations that could have been shared.
        prompts: prompts that were computed for them; equal to `rows` where nothing was shared.
        plain: reason -> number of calls that ran plainly because of it.
        in_training: (prompts, rows) of the calls of a model in training mode.
    """

    rows: int = 0
    prompts: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    in_training: tuple[int, int] = (0, 0)

    @property
    def prompts_per_row(self) -> float:
        """Prompts computed per row, in (0, 1]; 1 / G where all G completions of each prompt were shared.

        Of a model that has been in training mode those calls alone count, so that evaluation is left out.
        """
        prompts, rows = self.in_training if self.in_training[1] else (self.prompts, self.rows)
        return prompts / rows if rows else 1.0

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.plain)})" if self.plain else ""
        return f"computed {self.prompts} prompts for {self.rows} rows{reasons}"

    def add(self, rows: int, prompts: int, plain: Iterable[str] = (), *, trains: bool = False) -> None:
        """Count `rows` rows, for which `prompts` prompts were computed, and the reasons of calls that ran plainly."""
        self.rows += rows
        self.prompts += prompts
        self.plain.update(plain)
        if trains:
            self.in_training = (self.in_training[0] + prompts, self.in_training[1] + rows)
