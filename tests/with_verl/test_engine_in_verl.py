"""verl's FSDP engine with signals, on a CPU: what it measures, and the gradients of its losses."""

import json
from pathlib import Path

import pytest
import torch
from reference import WANTED, Reference, check_gradients
from support.launching import launch
from tiny_rollout import GROUP

WORKER = Path(__file__).parent / "parts" / "engine_worker.py"


@pytest.mark.parametrize(("layout", "processes"), [("padded", 1), ("packed", 1), ("padded", 2), ("packed", 2)])
def test_signals_and_gradients(layout, processes, tmp_path):
    launch(WORKER, tmp_path, layout, json.dumps(WANTED), processes=processes)
    parts = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(processes)]
    shared = [part.pop("shared") for part in parts]
    columns = {name: torch.cat([torch.tensor(part[name]) for part in parts]) for name in parts[0]}
    reference = Reference()
    reference.check_columns(columns["log_probs"], columns)
    assert shared == [None if layout == "packed" else 1 / GROUP] * processes
    check_gradients(torch.load(tmp_path / "gradients.pt"), reference.gradients(columns["log_probs"]))
