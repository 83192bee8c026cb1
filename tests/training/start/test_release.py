import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from trl.trainer import utils as trl_utils

from vgr_trl.errors import UnsupportedTRLError
from vgr_trl.validate.options import check_head


def run_with_trl(folder, release, code, **variables):
    (folder / f"trl-{release}.dist-info").mkdir()
    (folder / f"trl-{release}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: trl\nVersion: {release}\n"
    )
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables)


@pytest.mark.parametrize("name", ["DAPOTrainer", "DAPOConfig"])
@pytest.mark.parametrize(("release", "trial"), [("1.14.2", "1"), ("1.17.0", "0")])
def test_an_untested_release_is_told_before_anything_of_it_is_imported(tmp_path, name, release, trial):
    (tmp_path / "trl.py").write_text("raise ImportError('a module that nobody has')")
    run = run_with_trl(tmp_path, release, f"from vgr_trl import {name}", VGR_TRL_UNTESTED=trial)
    assert run.returncode == 1
    assert f"UnsupportedTRLError: TRL {release} is installed, but vgr_trl needs another" in run.stderr
    assert ("VGR_TRL_UNTESTED" in run.stderr) == (release == "1.17.0")


def test_a_newer_release_can_be_tried_with_one_warning(tmp_path):
    code = "from vgr_trl import DAPOConfig, DAPOTrainer; from vgr_trl.errors import check_release; check_release()"
    run = run_with_trl(tmp_path, "1.17.0", code, VGR_TRL_UNTESTED="1", PYTHONWARNINGS="always")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("TRL 1.17.0 is installed") == 1


@pytest.mark.parametrize(
    ("release", "device", "kernel", "is_told"),
    [
        ("1.15.0", "cpu", None, True), ("1.15.0", "cuda", "trl.kernels.chunked_logprob", False),
        ("1.15.0", "cpu", "support.trl_head", False), ("1.16.0", "cpu", "trl.kernels.chunked_logprob", False),
    ],
)  # fmt: skip
def test_a_head_that_needs_a_gpu_is_told_where_there_is_none(monkeypatch, release, device, kernel, is_told):
    function = None if kernel is None else type("Function", (), {"__module__": kernel})
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", function)
    expected = pytest.raises(UnsupportedTRLError)
    with expected if is_told else nullcontext():
        check_head(torch.device(device), installed=release)
