"""A name of an installed package, as if it were not there."""

import enum
import importlib


def take_away(point, monkeypatch):
    owner, (*path, name) = importlib.import_module(point.module), point.name.split(".")
    for part in path:
        module, owner = owner, getattr(owner, part)
    if isinstance(owner, enum.EnumMeta):  # whose members stay
        monkeypatch.delattr(module, path[-1])
        return
    for each in getattr(owner, "__mro__", [owner]):
        if name in vars(each):
            monkeypatch.delattr(each, name)
