"""A tracker that cannot be reached ends a run at its start; one that fails later does not; other callbacks do."""

from importlib.util import find_spec

import pytest
from support.commands import finish, train_command
from support.trainers import train_file
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from vgr_trl.utils import ConfigError

NOBODY = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB__SERVICE_WAIT": "900"}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
@pytest.mark.parametrize(("mode", "seconds", "status"), [("online", 2, 1), ("offline", 900, 0)])
def test_wandb_whose_server_does_not_answer(mode, seconds, status, model_folder, question_files, tmp_path):
    output = tmp_path / "run"
    flags = "--per_device_train_batch_size 4 --max_steps 1 --report_to wandb"
    command = train_command(model_folder, train_file(question_files), output, flags)
    waits = {"WANDB_INIT_TIMEOUT": str(seconds)}
    run = finish(command, WANDB_DIR=str(tmp_path), WANDB_MODE=mode, **NOBODY, **waits)
    assert run.returncode == status, run.stderr[-3000:]
    assert "Traceback" not in run.stderr
    assert (output / "model.safetensors").exists() == (status == 0)
    if status:
        assert "vgr-trl train: Tracker Wandb of report_to cannot be started (CommError: " in run.stderr
        assert "WANDB_MODE=offline for wandb), or give report_to none." in run.stderr


@pytest.fixture
def failing(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host")

    return lambda event: monkeypatch.setattr(TensorBoardCallback, event, fail)


@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed")
def test_a_tracker_that_fails_later_is_said_once_and_outlived(text_trainer, failing, caplog):
    failing("on_log")
    trainer = text_trainer(max_steps=3, report_to="tensorboard")
    trainer.train()
    assert trainer.state.global_step == 3
    (said,) = [record.getMessage() for record in caplog.records if " failed (" in record.getMessage()]
    assert said.startswith("Tracker TensorBoard failed (OSError: no route to host); training continues")


@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed")
def test_a_tracker_that_fails_at_the_start_is_named(text_trainer, failing):
    failing("on_train_begin")
    with pytest.raises(ConfigError, match=r"Tracker TensorBoard of report_to cannot be started \(OSError: no route"):
        text_trainer(max_steps=1, report_to="tensorboard").train()


def test_a_callback_that_raises_ends_the_run_which_can_be_continued(text_trainer, tmp_path):
    class Raises(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyError("mine")

    options = {"output_dir": tmp_path / "run", "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer = text_trainer(**options)
    trainer.add_callback(Raises())
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    resumed = text_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
