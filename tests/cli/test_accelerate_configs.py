from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
EXPECTED = {
    "cpu": "MULTI_GPU",
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "fsdp2": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "deepspeed_zero2": "DEEPSPEED",  # as our users' scripts name them
    "deepspeed_zero3": "DEEPSPEED",
}


def test_every_file_is_known():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize(("name", "kind"), EXPECTED.items())
def test_accelerate_accepts_the_file(name, kind):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert config.use_cpu == (name == "cpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
