from unittest.mock import Mock

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from vgr_trl.cli import __main__ as command
from vgr_trl.cli.__main__ import COMMANDS, main

EXPECTED = {"cpu": "MULTI_GPU", "single_gpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp2": "FSDP"}
EXPECTED |= dict.fromkeys(("zero2", "zero3", "two_machines"), "DEEPSPEED")
EXPECTED |= dict.fromkeys(("deepspeed_zero2", "deepspeed_zero3"), "DEEPSPEED")  # as our users' scripts name them


def test_a_full_disk_is_one_sentence_in_every_command(monkeypatch, capsys):
    weights = {"weights": torch.zeros(1_000_000)}
    monkeypatch.setitem(command.COMMANDS, "report", lambda rest: torch.save(weights, "/dev/full"))
    assert main(["report", "run"]) == 1
    assert "Disk full while writing files" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    "report run --live inf", f"report {'x' * 300}",
    f"init {'x' * 300}", f"demo --output_dir {'x' * 300}", "demo --threads 0",
])  # fmt: skip
def test_values_that_no_command_can_use_are_one_sentence(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 1
    assert "vgr-trl" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--laptop"]])
def test_init_writes_options_that_exist_and_keeps_what_is_there(tmp_path, capsys, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vgr_trl.demo.write_folder.write_warm_folder", lambda *arguments: None)
    assert main(["init", *more]) == 0
    text = (tmp_path / "train.yaml").read_text()
    assert main(["init", *more]) == 1
    assert "File exists" in capsys.readouterr().err
    assert (tmp_path / "train.yaml").read_text() == text
    flags = "--config train.yaml --system_prompt_file none --use_cpu --bf16 false --output_dir train.yaml"
    assert main(["train", *flags.split()]) == 1
    assert "output_dir is train.yaml" in capsys.readouterr().err, "every option of the file is one of the command"


def test_a_torchvision_of_another_torch_is_one_sentence_in_every_command(monkeypatch, capsys):
    """As transformers raises it at the first import; `env` looks for it, since it prints versions without it."""
    hidden = ModuleNotFoundError("Could not import module 'BloomPreTrainedModel'.")
    hidden.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setitem(COMMANDS, "report", Mock(side_effect=hidden))
    monkeypatch.setattr("vgr_trl.cli.__main__.find_spec", lambda name: name)
    monkeypatch.setattr("vgr_trl.cli.__main__.import_module", Mock(side_effect=hidden))
    for name in ("report", "env"):
        assert main([name]) == 1
        assert "--torch-backend" in capsys.readouterr().err


def test_accelerate_accepts_each_file_that_is_listed_and_an_unknown_name_is_refused(capsys):
    assert main(["path"]) == 0
    assert set(capsys.readouterr().out.split()) == set(EXPECTED)
    for name, engine in EXPECTED.items():
        assert main(["path", name]) == 0
        config = load_config_from_file(capsys.readouterr().out.strip())
        assert (config.distributed_type.value, config.use_cpu) == (engine, name == "cpu")
        if engine == "DEEPSPEED":
            assert config.deepspeed_config["zero_stage"] == (3 if name.endswith("3") else 2)
    with pytest.raises(SystemExit):
        main(["path", "zero4"])
    assert "invalid choice: 'zero4'" in capsys.readouterr().err
