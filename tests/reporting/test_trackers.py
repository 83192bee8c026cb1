"""What reaches the trackers through `report_to`, read back from where they keep it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launching import environment


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("trackio")
    folder = tmp_path_factory.mktemp("trackers")
    command = [sys.executable, str(Path(__file__).with_name("trackers_worker.py")), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(TRACKIO_DIR=str(folder / "trackio")))
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "held.json").read_text())


def test_every_metric_reaches_trackio(held: dict[str, Any]) -> None:
    found: dict[str, dict[int, float]] = {}
    for entry in held["trackio"]:
        for name, value in entry.items():
            if name.startswith(("train/", "eval/")) and "train/global_step" in entry:
                found.setdefault(name, {})[int(entry["train/global_step"])] = value
    expected: dict[str, dict[int, float]] = {}
    for entry in held["logs"]:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                called = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                expected.setdefault(called, {})[entry["step"]] = value
    assert {"train/attention/late/vgr", "eval/rewards/vgr_reward/mean", "train/perf/tokens_per_second"} <= set(found)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name
