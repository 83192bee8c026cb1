"""The modules of `benchmarks/`, which is no package."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Gives a module by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
