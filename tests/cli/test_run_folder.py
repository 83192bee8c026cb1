import json
import re

import pytest

from vgr_trl.checkpoints import how_to_go_on, resolve_checkpoint, write_manifest
from vgr_trl.cli.train import claim, claim_again, write_identity
from vgr_trl.utils import ConfigError

RUN = {"model": "m", "data": "d", "reward_funcs": ["accuracy"]}


def test_the_folder_of_another_run_is_refused(tmp_path):
    claim(tmp_path, RUN, None)
    write_identity(tmp_path, RUN)
    claim(tmp_path, RUN, None)  # a run that failed before its first checkpoint leaves nothing to lose
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ConfigError, match=re.escape("holds a run (checkpoint-3): choose another output_dir")):
        claim(tmp_path, RUN, None)
    claim(tmp_path, RUN, "latest")


def test_a_run_that_is_interrupted_goes_on_from_a_checkpoint_only_if_there_is_one(tmp_path):
    assert "--resume_from_checkpoint" not in how_to_go_on(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    assert "--resume_from_checkpoint" not in how_to_go_on(tmp_path), "it was being written"
    (tmp_path / "checkpoint-3" / "rng_state.pth").touch()
    write_manifest(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-4").mkdir()
    assert how_to_go_on(tmp_path) == f"--resume_from_checkpoint continues from {tmp_path / 'checkpoint-3'}"


def test_checkpoints_without_a_run_file_count_as_another_run(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match=re.escape("holds a run (checkpoint-7)")):
        claim(tmp_path, RUN, None)


def test_a_run_is_not_continued_with_another_model(tmp_path):
    write_identity(tmp_path, RUN)
    with pytest.raises(ConfigError, match="holds a run with model 'm', but 'other' was given"):
        claim(tmp_path, {**RUN, "model": "other"}, "latest")
    assert json.loads((tmp_path / "run.json").read_text()) == RUN


def test_a_finished_run_of_trl_and_a_file_are_refused_too(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds a run \\(model.safetensors\\)"):
        claim(tmp_path, RUN, None)
    with pytest.raises(ConfigError, match="model.safetensors cannot be written to: choose another place"):
        claim(tmp_path / "model.safetensors", RUN, None)
    with pytest.raises(ConfigError, match="model.safetensors cannot be written to: choose another place"):
        claim(tmp_path / "model.safetensors" / "below", RUN, None)
    with pytest.raises(ConfigError, match="no complete checkpoint, only a finished run"):
        resolve_checkpoint("latest", tmp_path)


def test_a_damaged_run_file_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json cannot be read"):
        claim(tmp_path, RUN, "latest")


def test_a_demo_may_be_repeated_in_its_own_folder_only(tmp_path):
    claim_again(tmp_path, {"command": "demo"})
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds another run \\(model.safetensors\\): choose another output_dir"):
        claim_again(tmp_path, {"command": "demo"})
    write_identity(tmp_path, {"command": "demo"})
    claim_again(tmp_path, {"command": "demo"})
    with pytest.raises(ConfigError, match="cannot be written to"):
        claim_again(tmp_path / "model.safetensors", {"command": "demo"})
