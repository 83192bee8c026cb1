import json
import re

import pytest
import torch
from safetensors.torch import save_file

from vgr_trl.cli.run_folder import (
    claim,
    claim_again,
    complete_checkpoints,
    refuse_finished,
    resolve_checkpoint,
    resume_mode,
    write_identity,
)
from vgr_trl.errors import ConfigError

RUN = {"model": "m", "data": "d", "reward_funcs": ["accuracy"]}


def checkpoint(folder, step, state='{"global_step": 1}'):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    torch.save({}, path / "optimizer.pt")
    torch.save({}, path / "scheduler.pt")
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
    claim(tmp_path, RUN, None)  # a run that failed before its first checkpoint leaves nothing to lose
    checkpoint(tmp_path, 3)
    with pytest.raises(ConfigError, match=re.escape("holds another run (checkpoint-3): choose another output_dir")):
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
    with pytest.raises(ConfigError, match="cannot be written to: choose a folder"):
        claim(tmp_path / "model.safetensors", RUN, None)
    with pytest.raises(ConfigError, match="cannot be written to: choose a folder"):
        claim(tmp_path / "model.safetensors" / "below", RUN, None)
    with pytest.raises(ConfigError, match="no checkpoint that was written to the end, only a finished run"):
        resolve_checkpoint("latest", tmp_path)


def test_a_damaged_run_file_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json cannot be read"):
        claim(tmp_path, RUN, "latest")


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "no whole weights"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x08"), "no whole weights"),
        (lambda path: (path / "optimizer.pt").write_bytes(b"PK"), "no whole optimizer.pt"),
        (lambda path: (path / "optimizer.pt").unlink(), "no whole optimizer.pt"),
        (lambda path: (path / "scheduler.pt").unlink(), "no whole scheduler.pt"),
        (lambda path: (path / "trainer_state.json").write_text("{}"), "no readable trainer_state.json"),
        (lambda path: (path / "trainer_state.json").write_text("[]"), "no readable trainer_state.json"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "missing or unfinished weights",
        ),
    ],
)
def test_every_file_of_a_checkpoint_must_be_whole(tmp_path, break_it, reason):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    break_it(newer)
    assert complete_checkpoints(tmp_path) == [older]
    with pytest.raises(ConfigError, match=f"not written to the end \\({reason}\\)"):
        resolve_checkpoint(str(newer), tmp_path)


def test_a_finished_run_is_not_trained_one_step_too_far(tmp_path):
    path = checkpoint(tmp_path, 4, state='{"global_step": 4}')
    refuse_finished(str(path), 5)
    refuse_finished(None, 4)
    with pytest.raises(ConfigError, match="was saved at step 4 of 4; raise max_steps"):
        refuse_finished(str(path), 4)


def test_a_demo_may_be_repeated_in_its_own_folder_only(tmp_path):
    claim_again(tmp_path, {"command": "demo"})
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds another run \\(model.safetensors\\): choose another output_dir"):
        claim_again(tmp_path, {"command": "demo"})
    write_identity(tmp_path, {"command": "demo"})
    claim_again(tmp_path, {"command": "demo"})
    with pytest.raises(ConfigError, match="cannot be written to"):
        claim_again(tmp_path / "model.safetensors", {"command": "demo"})
