"""Two processes of which one has fewer rows with a gradient, or none."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import launch

WORKER = Path(__file__).with_name("rank_worker.py")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(f"zero{n}", marks=needs_deepspeed) for n in (2, 3))])
def test_steps_are_those_of_trl(kind):
    stage = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[-1], "DS_ACCELERATOR": "cpu"}
    launch(WORKER, kind, processes=2, engine={} if kind == "ddp" else stage)
