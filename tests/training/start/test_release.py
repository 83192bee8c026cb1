import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from trl.trainer import utils as trl_utils

from vgr_trl.utils import UnsupportedTRLError
from vgr_trl.validate.options import check_head


@pytest.mark.parametrize("code", ["from vgr_trl import DAPOTrainer", "from vgr_trl import DAPOConfig"])
def test_an_untested_release_is_told_before_anything_of_it_is_imported(tmp_path, code):
    (tmp_path / "trl-1.14.2.dist-info").mkdir()
    (tmp_path / "trl-1.14.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.14.2\n")
    (tmp_path / "trl.py").write_text("raise ImportError('a module that nobody has')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert run.returncode == 1
    assert "UnsupportedTRLError: TRL 1.14.2 is installed, but vgr_trl needs another" in run.stderr


@pytest.mark.parametrize(
    ("release", "device", "kernel", "is_told"),
    [
        ("1.15.0", "cpu", None, True),
        ("1.15.0", "cuda", "trl.kernels.chunked_logprob", False),
        ("1.15.0", "cpu", "support.trl_head", False),
        ("1.16.0", "cpu", "trl.kernels.chunked_logprob", False),
    ],
)
def test_a_head_that_needs_a_gpu_is_told_where_there_is_none(monkeypatch, release, device, kernel, is_told):
    function = None if kernel is None else type("Function", (), {"__module__": kernel})
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", function)
    expected = pytest.raises(UnsupportedTRLError)
    with expected if is_told else nullcontext():
        check_head(torch.device(device), installed=release)
