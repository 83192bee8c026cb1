import pytest
from accelerate.commands.config.config_args import load_config_from_file

from vgr_trl.cli.__main__ import main

EXPECTED = {
    "cpu": "MULTI_GPU",
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "fsdp2": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "two_machines": "DEEPSPEED",
    "deepspeed_zero2": "DEEPSPEED",  # as our users' scripts name them
    "deepspeed_zero3": "DEEPSPEED",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_accepts_the_file(name, capsys):
    assert main(["path", name]) == 0
    path = capsys.readouterr().out.strip()
    config = load_config_from_file(path)
    assert config.distributed_type.value == EXPECTED[name]
    assert config.use_cpu == (name == "cpu")
    if EXPECTED[name] == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == (3 if name.endswith("3") else 2)


def test_names_are_listed_and_an_unknown_name_is_refused_with_them(capsys):
    assert main(["path"]) == 0
    assert set(capsys.readouterr().out.split()) == set(EXPECTED)
    with pytest.raises(SystemExit):
        main(["path", "zero4"])
    assert "invalid choice: 'zero4'" in capsys.readouterr().err
