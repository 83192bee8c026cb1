import json
from pathlib import Path

import pytest
import torch
from same_as_trl import WANTED, check, expected_of
from support.launching import launch
from tiny_rollout import GROUP, SCORES, rollout, tiny_model

WORKER = Path(__file__).parent / "parts" / "verl_step.py"
OPTIONS = WANTED | {"enable_entropy_filtering": True}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return expected_of(tmp_path_factory.mktemp("trl"), OPTIONS)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_advantages_and_gradients(expected, layout, processes, tmp_path):
    launch(WORKER, tmp_path, layout, json.dumps(OPTIONS), processes=processes)
    tensors, _ = rollout(*tiny_model(), prompts=len(SCORES) // GROUP)
    check(torch.load(tmp_path / "steps.pt"), expected, tensors["response_mask"])
