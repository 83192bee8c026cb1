"""Two processes on one machine, over gloo."""

from pathlib import Path

import pytest
from support.launching import ENGINES, KINDS, launch, needs_deepspeed

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["process_worker.py", pytest.param("zero_worker.py", marks=needs_deepspeed)])
def test_gradients_are_the_same(worker):
    launch(HERE / worker, processes=2, engine={})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_trainer_are_the_same(kind):
    launch(HERE / "trainer_worker.py", kind, processes=2, engine=ENGINES[kind])
