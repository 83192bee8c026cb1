"""Families beside those of `FAMILIES`."""

from support.models.families import OTHERS

__all__ = ["OTHERS"]
