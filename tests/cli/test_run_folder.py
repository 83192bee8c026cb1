import json
import re

import pytest

from vgr_trl.cli.run_folder import claim, complete_checkpoints, resolve_checkpoint, resume_mode, write_identity
from vgr_trl.errors import ConfigError

RUN = {"model": "m", "data": "d", "reward_funcs": ["accuracy"]}


def checkpoint(folder, step, state='{"global_step": 1}'):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return path


def test_checkpoints_that_were_not_written_to_the_end_are_passed_over(tmp_path):
    complete = [checkpoint(tmp_path, 5), checkpoint(tmp_path, 10)]
    checkpoint(tmp_path, 15, state='{"global_step": 1')
    checkpoint(tmp_path, 20, state=None)
    (tmp_path / "checkpoint-best").mkdir()
    assert complete_checkpoints(tmp_path) == complete
    assert resolve_checkpoint("latest", tmp_path) == str(complete[-1])
    assert resolve_checkpoint(str(complete[0]), tmp_path) == str(complete[0])


def test_latest_without_any_checkpoint_starts_at_the_beginning(tmp_path):
    assert resolve_checkpoint("latest", tmp_path) is None
    assert resolve_checkpoint(None, tmp_path) is None


def test_a_named_checkpoint_must_exist_and_be_whole(tmp_path):
    with pytest.raises(ConfigError, match="nowhere, which is no folder: give a checkpoint, or latest"):
        resolve_checkpoint("nowhere", tmp_path)
    half = checkpoint(tmp_path, 3, state=None)
    with pytest.raises(ConfigError, match="was not written to the end"):
        resolve_checkpoint(str(half), tmp_path)


def test_the_folder_of_another_run_is_refused(tmp_path):
    claim(tmp_path, RUN, None)
    write_identity(tmp_path, RUN)
    with pytest.raises(ConfigError, match=re.escape("holds another run (run.json): choose another output_dir")):
        claim(tmp_path, RUN, None)
    claim(tmp_path, RUN, "latest")


def test_checkpoints_without_a_run_file_count_as_another_run(tmp_path):
    checkpoint(tmp_path, 7)
    with pytest.raises(ConfigError, match=re.escape("holds another run (checkpoint-7)")):
        claim(tmp_path, RUN, None)


def test_a_run_is_not_continued_with_another_model(tmp_path):
    write_identity(tmp_path, RUN)
    with pytest.raises(ConfigError, match="holds a run with model 'm', but 'other' was given"):
        claim(tmp_path, {**RUN, "model": "other"}, "latest")
    assert json.loads((tmp_path / "run.json").read_text()) == RUN


@pytest.mark.parametrize("value", [None, False, "false", "False", "none", ""])
def test_values_that_mean_a_start_at_the_beginning(value):
    assert resume_mode(value) is None


@pytest.mark.parametrize("value", [True, "true", "latest", "Latest"])
def test_values_that_mean_the_latest(value):
    assert resume_mode(value) == "latest"


def test_a_finished_run_of_trl_and_a_file_are_refused_too(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds another run \\(model.safetensors\\)"):
        claim(tmp_path, RUN, None)
    with pytest.raises(ConfigError, match="is a file: choose a folder"):
        claim(tmp_path / "model.safetensors", RUN, None)


def test_a_damaged_run_file_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json cannot be read"):
        claim(tmp_path, RUN, "latest")
