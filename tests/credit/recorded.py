"""Numbers recorded from EasyR1's `core_algos.py` and from VPPO's code."""

import json
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"

needs_recorded = pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/golden")
CORE, VPPO = (json.loads((GOLDEN / f"{name}.json").read_text()) if GOLDEN.exists() else {} for name in ("core", "vppo"))
CORE = CORE.get("cases", [])


def tensors(case: dict, *names: str) -> list[torch.Tensor]:
    return [torch.tensor(case[name]) for name in names]
