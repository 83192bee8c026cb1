from functools import partial

import pytest
import trl
from packaging.version import Version

if Version(trl.__version__) < Version("1.16"):
    collect_ignore_glob = ["test_*.py"]  # the calls of tools are parsed otherwise


@pytest.fixture
def make(model_folder, vision_trainer, tmp_path):
    from support.tool_runs import tool_trainer  # needs that TRL

    return partial(tool_trainer, model_folder, vision_trainer.rows, tmp_path / "run")
