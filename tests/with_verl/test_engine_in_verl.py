"""verl's FSDP engine with signals, on a CPU: two processes measure what one does, with the same gradients."""

import json
from pathlib import Path

import pytest
import torch
from support.launching import launch

WORKER = Path(__file__).parent / "parts" / "engine_worker.py"
WANTED = {
    "enable_token_weights": True, "token_weight_last_k_layers": 1, "enable_perception_filtering": True,
    "use_entropy_penalty": True, "perception_loss_weight": 0.5, "der_loss_weight2": 0.1,
}  # fmt: skip


def measured(folder, layout, processes):
    """Columns of all rows, and gradients."""
    folder.mkdir()
    launch(WORKER, folder, layout, json.dumps(WANTED), processes=processes)
    parts = [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return columns, torch.load(folder / "gradients.pt")


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_signals_and_gradients(layout, tmp_path):
    expected, alone = measured(tmp_path / "1", layout, 1)
    found, together = measured(tmp_path / "2", layout, 2)
    mask = expected.pop("response_mask").bool()
    assert {"vgr_token", "vgr_dependency"} <= expected.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name][mask], values[mask], rtol=1e-4, atol=1e-5), name
    assert alone.keys() == together.keys()
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    assert largest > 1e-3
    for name, gradient in alone.items():
        assert (together[name] - gradient).abs().max() < 1e-5 * largest + 1e-6, name
