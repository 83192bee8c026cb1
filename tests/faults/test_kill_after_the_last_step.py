"""A run whose model was not written, though all steps are behind it, writes it when it is started again."""

import json

import pytest
from safetensors.torch import load_file
from support.commands import finish, train_command
from support.trainers import train_file


@pytest.mark.minutes
def test_the_model_is_written_and_a_finished_run_is_refused(model_folder, question_files, tmp_path):
    output = tmp_path / "run"
    flags = "--per_device_train_batch_size 4 --max_steps 2 --save_steps 1 --resume_from_checkpoint"
    command = train_command(model_folder, train_file(question_files), output, flags)
    assert finish(command).returncode == 0
    weights = {name: value.clone() for name, value in load_file(output / "model.safetensors").items()}
    metrics = json.loads((output / "metrics.json").read_text())
    finished = finish(command)
    assert finished.returncode == 1
    assert "The run is finished: " in finished.stderr
    (output / "metrics.json").unlink()  # as of a run that is killed while it writes its model
    (output / "model.safetensors").write_bytes(b"torn")
    again = finish(command)
    assert again.returncode == 0, again.stderr[-3000:]
    written = load_file(output / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(bool((value == weights[name]).all()) for name, value in written.items())
    assert json.loads((output / "metrics.json").read_text()) == metrics
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
