from errno import ENOSPC

import pytest
from pandas import DataFrame
from transformers.integrations import TensorBoardCallback, integration_utils

from vgr_trl.errors import ConfigError

pytest.importorskip("tensorboard")


@pytest.fixture
def failing(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host")

    return lambda event: monkeypatch.setattr(TensorBoardCallback, event, fail)


def test_a_tracker_that_fails_later_is_said_once_and_outlived(text_trainer, failing, caplog):
    failing("on_log")
    trainer = text_trainer(max_steps=3, report_to="tensorboard")
    trainer.train()
    assert trainer.state.global_step == 3
    (said,) = [record.getMessage() for record in caplog.records if " failed (" in record.getMessage()]
    assert said.startswith("Tracker TensorBoard failed (OSError: no route to host); training continues")


def test_training_goes_on_without_tables_on_a_full_disk(text_trainer, monkeypatch):
    def full(table, path):
        raise OSError(ENOSPC, "No space left on device", path)

    warned = []
    monkeypatch.setattr(DataFrame, "to_parquet", full)
    monkeypatch.setattr("vgr_trl.patches.trl.logger.warning_once", warned.append)
    trainer = text_trainer(max_steps=2, log_completions=True, num_completions_to_print=0)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2]
    assert "No space left on device" in warned[0]


def test_a_tracker_that_is_missing_is_named_and_its_callback_is_not_made(text_trainer, monkeypatch):
    """MLflow's raises in its constructor, and again in its destructor."""
    monkeypatch.setattr(integration_utils, "is_mlflow_available", lambda: False)
    with pytest.raises(ConfigError, match="report_to names mlflow, which is not available"):
        text_trainer(report_to="mlflow")
