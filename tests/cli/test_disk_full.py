import errno
from types import SimpleNamespace

import pytest
import torch

from vgr_trl.cli import __main__ as command


def write_to_a_full_disk(rest):
    torch.save({"weights": torch.zeros(1_000_000)}, "/dev/full")


def report_a_full_disk(rest):
    raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.json")


@pytest.mark.parametrize(("work", "named"), [(write_to_a_full_disk, "files"), (report_a_full_disk, "run/metrics.json")])
def test_a_full_disk_is_one_sentence_in_every_command(work, named, monkeypatch, capsys):
    monkeypatch.setattr(command.importlib, "import_module", lambda name: SimpleNamespace(main=work))
    assert command.main(["report", "run"]) == 1
    assert capsys.readouterr().err == (
        f"vgr-trl report: disk full while writing {named}: free space, then run it again.\n"
    )
