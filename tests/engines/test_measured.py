"""An update of ours beside TRL's own under each engine: the same weights, fewer positions, fewer bytes moved."""

import json
import re
from pathlib import Path

import engines
import pytest
from support.launching import launch

WORKER = Path(__file__).with_name("measure_worker.py")
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
NAMES = {
    "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "offload": "ZeRO-3, optimizer on the CPU", "fsdp2": "FSDP2",
}  # fmt: skip


def ratio(measured: dict, *counted: str) -> float:
    """Of the second update, ours to TRL's: in the first, DeepSpeed still records the order of modules."""
    ours, theirs = (sum(measured[whose].get(f"update 2 {what}", 0) for what in counted) for whose in ("ours", "trl"))
    return ours / theirs


def figures_in_page(name: str) -> list[float]:
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (0\..*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return [float(figure) for figure in re.findall(r"\d+\.\d+", row)]


@pytest.mark.minutes
@pytest.mark.parametrize("kind", NAMES)
def test_an_update_takes_less_than_trls_whatever_the_micro_batch(kind, model_folder, tmp_path):
    launch(WORKER, kind, model_folder, tmp_path, processes=2, engine=engines.as_if_large(kind, tmp_path))
    cases = json.loads((tmp_path / f"{kind} measured.json").read_text())
    cases.sort(key=lambda case: (case["lora"], case["batch"]))  # as in the page
    found = []
    for case in cases:
        positions, moved = ratio(case, "positions"), ratio(case, "gathered bytes", "reduced bytes")
        assert case["difference"] < 1e-4, case
        assert moved <= 1, case
        if case["budget"] is None:
            assert positions <= 0.3, case
            found += [positions, moved]
    assert found == pytest.approx(figures_in_page(NAMES[kind]), abs=0.02)
