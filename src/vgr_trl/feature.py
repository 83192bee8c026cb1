"""A feature of a run that is on, or off with a reason; prompt sharing and the trainer both report them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature that is on unless `reason` is set; printed as "on", or "off" and why.

    Attributes:
        reason: why it is off; None: it is on.
    """

    reason: str | None = None

    @property
    def enabled(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "on" if self.reason is None else f"off ({self.reason})"
