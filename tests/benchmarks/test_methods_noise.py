"""What share of a step's gradient is signal, by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def noise(module):
    return module("methods.noise")


def test_it_is_a_command():
    """Without a task it says which there are; a module that nobody calls would say nothing."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(str(root / folder) for folder in ("src", "benchmarks"))
    command = [sys.executable, "-m", "methods.noise", "--tasks", "none"]
    told = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "style-32" in told.stderr


@pytest.mark.parametrize(
    ("gradients", "share"),
    [([[2, 0], [2, 0]], 1), ([[1, 0], [0, 1]], 0), ([[1, 0], [-1, 0]], -1), ([[1, 1], [1, -1], [1, 0]], 0.4)],
)
def test_signal_is_what_two_batches_have_in_common(gradients, share, noise):
    """The last: products of pairs are 0, 1 and 1, squares 2, 2 and 1; of their means one is 0.4 of the other."""
    assert noise.signal(torch.tensor(gradients, dtype=torch.float)) == pytest.approx(share)


def test_credit_is_the_sum_of_its_tokens(noise):
    """Words read off always say (3, 0), filler (0, 4) or (0, -4): a product of two sums is 9 - 16, a square 25.

    Divided by roots of mean squares, 3 and 4, the sums are (1, 1) and (1, -1), at right angles.
    """
    gradients = torch.tensor([[[3.0, 0.0], [0.0, sign * 4.0], [0.0, 0.0]] for sign in (1, -1)])
    found = noise.measures(gradients)
    assert found["all tokens"] == pytest.approx([5, -7 / 25, 0])
    assert found["words read off"] == pytest.approx([3, 1, 1])
    assert found["filler"] == pytest.approx([4, -1, -1])


def test_rewards_are_compared_within_a_prompt(noise):
    """Of two completions one is right: ± half of 1 over the deviation 1 / √2; where both are, nothing."""
    texts = [f"<think>a</think><answer>{word}</answer>" for word in ("red", "blue", "red", "red")]
    advantages = noise.advantages_of(texts, ["red"] * 4, 2)
    assert advantages.tolist() == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-3)
