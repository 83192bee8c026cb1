import pytest
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.run import determine_local_world_size

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


@pytest.mark.filterwarnings("ignore:Port `29500` is already in use")  # by another run on this machine
@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_accepts_the_file_and_starts_a_process_for_each_gpu(name, monkeypatch, capsys):
    assert main(["path", name]) == 0
    path = capsys.readouterr().out.strip()
    config = load_config_from_file(path)
    assert config.distributed_type.value == EXPECTED[name]
    assert config.use_cpu == (name == "cpu")
    if EXPECTED[name] == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == (3 if name.endswith("3") else 2)
    torchrun = []
    monkeypatch.setattr("torch.distributed.run.run", torchrun.append)
    more = ["--num_processes", "16", "--main_process_ip", "10.0.0.1", "--machine_rank", "1"]
    given = ["--config_file", path, *(more if name == "two_machines" else []), "train.py"]
    if name in ("cpu", "single_gpu"):
        return
    launch.launch_command(launch.launch_command_parser().parse_args(given))
    if name == "two_machines":
        assert (torchrun[0].nnodes, torchrun[0].nproc_per_node, torchrun[0].node_rank) == ("2", "8", 1)
        return
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert determine_local_world_size(torchrun[0].nproc_per_node) == 3


def test_names_are_listed_and_an_unknown_name_is_refused_with_them(capsys):
    assert main(["path"]) == 0
    assert set(capsys.readouterr().out.split()) == set(EXPECTED)
    with pytest.raises(SystemExit):
        main(["path", "zero4"])
    assert "invalid choice: 'zero4'" in capsys.readouterr().err
