import json
from pathlib import Path

import engines
import pytest
from support.launching import launch

WORKER = Path(__file__).with_name("as_trl_worker.py")


@pytest.mark.minutes
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero2 file", "zero3", "offload", "fsdp2"])
def test_updates_are_those_of_trl_and_prompts_are_computed_once(kind, model_folder, tmp_path):
    launch(WORKER, kind, model_folder, tmp_path, processes=2, engine=engines.as_if_large(kind, tmp_path))
    for case in json.loads((tmp_path / f"{kind}.json").read_text()):
        assert case["difference"] < 1e-4, case
        assert case["sizes"] in (None, [8, 1]), "whole groups, also in the configuration of DeepSpeed"
        assert case["prompts_per_row"] < (0.5 if case["budget"] is None else 1), case
