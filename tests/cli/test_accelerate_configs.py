from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.run import determine_local_world_size

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
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
OF_ITS_OWN = ("cpu", "two_machines")  # numbers of processes


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
        assert config.deepspeed_config["zero_stage"] == (3 if name.endswith("3") else 2)


def handed_to_torchrun(monkeypatch, *arguments):
    """What `accelerate launch` makes of its arguments."""
    handed = []
    monkeypatch.setattr("torch.distributed.run.run", handed.append)
    launch.launch_command(launch.launch_command_parser().parse_args([*arguments, "train.py"]))
    return handed[0]


@pytest.mark.filterwarnings("ignore:Port `29500` is already in use")  # by another run on this machine
@pytest.mark.parametrize("name", [name for name, kind in EXPECTED.items() if kind != "NO" and name not in OF_ITS_OWN])
def test_there_are_as_many_processes_as_gpus_unless_told_otherwise(name, monkeypatch):
    file = str(FOLDER / f"{name}.yaml")
    found = handed_to_torchrun(monkeypatch, "--config_file", file)
    told = handed_to_torchrun(monkeypatch, "--config_file", file, "--num_processes", "5")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert determine_local_world_size(found.nproc_per_node) == 3
    assert determine_local_world_size(told.nproc_per_node) == 5


def test_two_machines_meet_at_the_first(monkeypatch):
    file = ["--config_file", str(FOLDER / "two_machines.yaml")]
    own = ["--num_processes", "16", "--main_process_ip", "10.0.0.1", "--machine_rank", "1"]
    handed = handed_to_torchrun(monkeypatch, *file, *own)
    assert (handed.nnodes, handed.nproc_per_node, handed.node_rank) == ("2", "8", 1)
    assert (handed.rdzv_backend, handed.rdzv_endpoint) == ("static", "10.0.0.1:29500")
    with pytest.raises(ValueError, match="num_processes"):
        handed_to_torchrun(monkeypatch, *file)
