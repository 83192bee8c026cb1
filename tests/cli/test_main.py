"""The command itself: its table, its errors, and the short commands."""

import errno
import warnings

import pytest
import torch

from vgr_trl.cli import __main__ as command
from vgr_trl.cli.__main__ import dedupe_warnings, main


def write_to_a_full_disk(rest):
    torch.save({"weights": torch.zeros(1_000_000)}, "/dev/full")


def report_a_full_disk(rest):
    raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.json")


@pytest.mark.parametrize(("work", "named"), [(write_to_a_full_disk, "files"), (report_a_full_disk, "run/metrics.json")])
def test_a_full_disk_is_one_sentence_in_every_command(work, named, monkeypatch, capsys):
    monkeypatch.setitem(command.COMMANDS, "report", ("", work))
    assert main(["report", "run"]) == 1
    assert f"disk full while writing {named}" in capsys.readouterr().err


def test_commands_are_listed_and_the_nearest_is_named(capsys):
    assert main(["--help"]) == 0
    assert "\n  train " in capsys.readouterr().out
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_version_and_environment(capsys):
    assert main(["--version"]) == 0
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("vgr_trl ") == 2
    assert all(name in printed for name in ("TRL version", "PyTorch version"))


@pytest.mark.parametrize("more", [[], ["--laptop"]])
def test_init_writes_options_that_exist_and_keeps_what_is_there(tmp_path, capsys, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vgr_trl.demo.write_folder.write_warm_folder", lambda *arguments: None)
    assert main(["init", *more]) == 0
    text = (tmp_path / "train.yaml").read_text()
    assert main(["init", *more]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "train.yaml").read_text() == text
    assert main(["train", "--config", "train.yaml", "--use_cpu", "--bf16", "false", "--output_dir", "train.yaml"]) == 1
    assert "output_dir is train.yaml" in capsys.readouterr().err, "every option of the file is one of the command"


def test_warnings_come_once_and_those_on_renamed_options_not_at_all():
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *where: shown.append(str(message))
        with dedupe_warnings():
            for _ in range(3):
                warnings.warn("beware", FutureWarning, stacklevel=1)
                warnings.warn("`is_gradient_checkpointing` is deprecated.", FutureWarning, stacklevel=1)
                with warnings.catch_warnings():  # as TRL does at every step, after which Python shows them again
                    warnings.simplefilter("ignore")
    assert shown == ["beware"]
