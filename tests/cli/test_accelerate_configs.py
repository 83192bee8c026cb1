import pytest
from accelerate.commands.config.config_args import load_config_from_file

from vgr_trl.cli.__main__ import main

EXPECTED = {"cpu": "MULTI_GPU", "single_gpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp2": "FSDP"}
EXPECTED |= dict.fromkeys(("zero2", "zero3", "two_machines"), "DEEPSPEED")
EXPECTED |= dict.fromkeys(("deepspeed_zero2", "deepspeed_zero3"), "DEEPSPEED")  # as our users' scripts name them


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
