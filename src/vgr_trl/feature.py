"""A feature of a run that is on, or off with a reason; prompt sharing and the trainer both report them."""

from dataclasses import dataclass


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
