"""The command itself: its table, its errors, the short commands, and the lines of a run on the terminal."""

import errno
import subprocess
import sys

import pytest
import torch
from transformers import TrainerState

from vgr_trl.cli import __main__ as command
from vgr_trl.cli.__main__ import main
from vgr_trl.cli.train import StepLines
from vgr_trl.reporting.markdown import duration, step_line


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
    assert all(f"\n  {name} " in capsys.readouterr().out for name in ("train",))
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_version_and_environment(capsys):
    assert main(["--version"]) == 0
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for name in ("vgr_trl", "torch", "trl", "transformers", "CUDA", "GPU"):
        assert f"\n{name} " in f"\n{printed}"


@pytest.mark.parametrize("more", [[], ["--laptop"]])
def test_init_writes_options_that_exist_and_keeps_what_is_there(tmp_path, capsys, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vgr_trl.demo.write_folder.write_warm_folder", lambda *arguments: None)
    assert main(["init", *more]) == 0
    text = (tmp_path / "train.yaml").read_text()
    assert len(text.splitlines()) < 45
    assert main(["init", *more]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "train.yaml").read_text() == text
    assert main(["train", "--config", "train.yaml", "--use_cpu", "--bf16", "false", "--output_dir", "train.yaml"]) == 1
    assert "output_dir is train.yaml" in capsys.readouterr().err, "every option of the file is one of the command"


def test_warnings_come_once_and_those_on_renamed_options_not_at_all():
    code = (
        "import warnings\nfrom vgr_trl.cli.__main__ import dedupe_warnings\n"
        "def warn(text):\n    warnings.warn(text, FutureWarning)\n"
        "with dedupe_warnings():\n"
        "    for _ in range(3):\n"
        "        warn('beware')\n"
        "        warn('`is_gradient_checkpointing` is deprecated and will be removed in v6. Use another.')\n"
        "        with warnings.catch_warnings():\n            warnings.simplefilter('ignore')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("beware") == 1
    assert "deprecated" not in done.stderr


def test_a_step_is_one_line(capsys):
    logs = {
        "reward": 1.5, "rewards/accuracy_reward/mean": 0.625, "completions/mean_length": 118.4, "loss": 0.01234,
        "attention/late/vgr": 0.71, "frac_reward_zero_std": 0.25,
    }  # fmt: skip
    line = step_line(7, 120, logs, 12.34)
    for part in ("step   7/120", "reward 1.500", "accuracy 0.625", "length 118", "VGR 0.710", "75%", "12.3 s/step"):
        assert part in line
    assert "23 min left" in line
    assert step_line(1, 2, {}, None) == "step 1/2"
    lines, state = StepLines(), TrainerState(global_step=2, max_steps=4, is_world_process_zero=True)
    lines.on_log(None, state, None, {"loss": 0.5})
    lines.on_log(None, state, None, {"train_loss": 0.5, "train_runtime": 1.0})
    assert capsys.readouterr().out == "step 2/4  loss 0.5000\n"


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (90, "2 min"), (720, "12 min"), (11_100, "3 h 05")])
def test_durations(seconds, text):
    assert duration(seconds) == text
