"""Tests with the installed package `verl`, which may be verl or EasyR1; without one there is nothing to run."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).with_name("parts")))

IS_INSTALLED = find_spec("verl") is not None
IS_EASYR1 = IS_INSTALLED and find_spec("verl.workers.actor") is not None

collect_ignore_glob = []
if not IS_INSTALLED or IS_EASYR1:
    collect_ignore_glob.append("test_*_in_verl.py")
if not IS_EASYR1:
    collect_ignore_glob.append("test_*_in_easyr1.py")


@pytest.fixture(autouse=True)
def one_thread():
    """Two passes are compared bit by bit, and threads sum in another order each time."""
    torch.set_num_threads(1)
