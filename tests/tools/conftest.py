from functools import partial

import pytest
from support.tool_runs import tool_trainer


@pytest.fixture
def make(model_folder, vision_trainer, tmp_path):
    """Builds trainers whose completions call tools: two prompts, four completions of one to three turns each."""
    return partial(tool_trainer, model_folder, vision_trainer.rows, tmp_path / "run")
