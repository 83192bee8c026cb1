"""Numbers recorded from EasyR1's `core_algos.py`, as tensors."""

import json
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[3] / "shared" / "golden" / "core.json"
NUM_CASES = 5

needs_recorded = pytest.mark.skipif(not FILE.exists(), reason="needs ../shared/golden/core.json")


def cases() -> list[dict]:
    return json.loads(FILE.read_text())["cases"] if FILE.exists() else []


def tensors(case: dict, *names: str) -> list[torch.Tensor]:
    return [torch.tensor(case[name]) for name in names]
