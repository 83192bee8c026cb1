"""What is relied on in verl, when it is not there."""

import subprocess
import sys

import pytest
from taking_away import take_away

from vgr_trl.integrations.verl.options import OF_VERL, check_points
from vgr_trl.utils import ConfigError

WITHOUT = """
import importlib, sys
module, name = sys.argv[1:]
delattr(importlib.import_module(module), name)
import vgr_trl.integrations.verl.inside_verl.plugin
"""


@pytest.mark.parametrize("point", OF_VERL, ids=lambda point: point.name)
def test_each_is_named_when_it_is_missing(point, monkeypatch):
    take_away(point, monkeypatch)
    with pytest.raises(ConfigError, match=f"^verl 0.9.1 is installed, and lacks .*{point.name}.*: install verl 0.9.1,"):
        check_points(OF_VERL, "verl 0.9.1")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.trainer.ppo.core_algos", "agg_loss"),
        ("verl.trainer.ppo.v1.trainer_base", "register_trainer"),
        ("verl.workers.utils.padding", "no_padding_2_padding"),
    ],
)
def test_the_sentence_comes_when_the_plugin_is_imported(module, name):
    """And not an `ImportError` of what the plug-in imports itself."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, module, name], capture_output=True, text=True, check=False)
    said = f"vgr_trl.utils.ConfigError: verl 0.9.1 is installed, and lacks {module}.{name}"
    assert done.stderr.strip().splitlines()[-1].startswith(said), done.stderr[-2000:]
