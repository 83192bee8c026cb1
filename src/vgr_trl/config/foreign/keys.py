"""What is known of a key of another trainer's configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key of EasyR1.

    Attributes:
        default: its value where the configuration does not state it.
        ours: the option that takes its value as it is.
        why: what is done with it otherwise: a rule reads it, it changes no result, or it has no counterpart.
        fits: the values that need no counterpart; others stop the run. None: all.
        is_read: a rule makes options of it.
    """

    default: Any
    ours: str | None = None
    why: str = ""
    fits: tuple[Any, ...] | None = None
    is_read: bool = False


def same(ours: str, default: Any) -> Key:
    """Return the key of an option that means the same here."""
    return Key(default, ours)


def read(default: Any, why: str = "") -> Key:
    """Return a key that a rule reads."""
    return Key(default, why=why, is_read=True)


def moot(default: Any, why: str) -> Key:
    """Return a key that changes how theirs computes, not what: any value will do."""
    return Key(default, why=why)


def only(default: Any, why: str, *fits: Any) -> Key:
    """Return a key without counterpart: its default and `fits` are what is done here, other values stop the run."""
    return Key(default, why=why, fits=(default, *fits))
