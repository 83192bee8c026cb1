"""How often the host waits for the device, counted on a pretended GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "shared" / "tools" / "pretend-cuda"


@pytest.mark.minutes
@pytest.mark.skipif(not TOOL.is_dir() or shutil.which("g++") is None, reason="needs the pretended GPU and g++")
def test_the_host_waits_as_rarely_as_with_trl(tmp_path):
    """At most 1.05 of TRL's waits by default, and at most 3 more for a further layer."""
    tool = shutil.copytree(TOOL, tmp_path / "tool")
    subprocess.run(["bash", str(tool / "build.sh"), sys.executable], check=True)

    def waits(whose, layers):
        command = [sys.executable, str(Path(__file__).with_name("waits_worker.py")), whose, str(layers)]
        environment = os.environ | {"PYTHONPATH": f"{tool}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return int(done.stdout.split()[-1])

    ours = waits("ours", 3)
    assert ours <= 1.05 * waits("trl", 3)
    assert waits("ours", 5) - ours <= 2 * 3
