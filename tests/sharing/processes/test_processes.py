"""Two processes on one machine, over gloo; steps of trainers in processes are compared in tests/efficiency."""

from pathlib import Path

from support.launching import launch


def test_gradients_are_the_same():
    launch(Path(__file__).with_name("process_worker.py"), processes=2, engine={})
