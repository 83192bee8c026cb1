"""Two processes of which one has fewer rows with a gradient, or none."""

from pathlib import Path

import pytest
from support.launching import ENGINES, KINDS, launch

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_trl(kind):
    launch(WORKER, kind, processes=2, engine=ENGINES[kind])
