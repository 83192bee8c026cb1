"""Every test here runs on a GPU, and in a few of its cases on a CPU too: it cannot fail there for a silly reason."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


def pytest_collection_modifyitems(config, items):
    passed = set()
    if torch.cuda.is_available() and (path := os.environ.get("GPU_RESULTS")):
        from gpu.results import read

        passed = {line.name for line in read(Path(path)) if line.found.get("outcome") == "passed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
    without = pytest.mark.skip(reason="needs a GPU: `make gpu-tests` on a machine that has one")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without)


def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get("GPU_DEADLINE", "inf")) - 30:
        pytest.skip("left out, the time is over")


@pytest.fixture
def measured(request):
    request.node.measured = {}
    return request.node.measured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Append one line to the results as soon as a test on a GPU is done."""
    report = yield
    path, is_on_gpu = os.environ.get("GPU_RESULTS"), torch.cuda.is_available() and item.get_closest_marker("gpu")
    if path and is_on_gpu and (report.when == "call" or not report.passed):
        from gpu.results import Line, append, machine

        found = {"outcome": report.outcome, **getattr(item, "measured", {})}
        if not report.passed:
            found["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(call.excinfo.value)
        append(Path(path), Line(item.nodeid, "", machine("cuda"), "make gpu-tests", found))
    return report


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.set_float32_matmul_precision(before)
