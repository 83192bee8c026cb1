import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from vgr_trl.cli.arguments import DataArguments, RewardArguments, parse
from vgr_trl.cli.data import make_parser
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo.write_folder import write_folder

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NO_RUNS = ("check.sh", "common.sh", "data.sh", "ablations.sh")
SCRIPTS = sorted(path.name for path in EXPERIMENTS.glob("*.sh") if path.name not in NO_RUNS)
NOTES = yaml.safe_load(Path(__file__).with_name("lines.yaml").read_text(encoding="utf-8"))


def run(script: str, folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script in `folder`, with its stubs and this interpreter's commands first on the path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("TINY", "DATA", "ACCELERATE_CONFIG")}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**clean, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(EXPERIMENTS / script), *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def stub(folder: Path, name: str, code: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
    (folder / "bin" / name).chmod(0o755)


def launched(script: str, folder: Path, *flags: str, **variables) -> list[str]:
    stub(folder, "accelerate", f'printf "%s\\n" "$@" > {folder}/given')
    (folder / "bin" / "deepspeed.py").touch()
    done = run(script, folder, *flags, **{"PYTHONPATH": str(folder / "bin")} | variables)
    assert done.returncode == 0, done.stderr
    return (folder / "given").read_text().splitlines()


def from_training_script(arguments: list[str]) -> list[str]:
    return arguments[next(at for at, word in enumerate(arguments) if word.endswith("train_grpo_vlm.py")) :]


def options(flags: list[str]):
    groups = (DataArguments, RewardArguments, DAPOConfig, ModelConfig)
    return parse(groups, "train", [*flags, "--use_cpu", "true", "--bf16", "false"])


def test_questions_of_the_notes_where_no_data_are_named():
    with_data = runpy.run_path(str(EXPERIMENTS.parent / "examples" / "train_grpo_vlm.py"))["with_data"]
    given = ["--max_short_side", "1024", "--use_peft", "--dataset_name", "lujunxi57/DDM"]
    assert with_data(["--use_peft"]) == given
    for given in (["--data_files", "a.jsonl"], ["--dataset_path=x"], ["--config", "x.yaml"], ["--help"]):
        assert with_data(given) == given


def test_flags_and_variables_override(tmp_path):
    flags = "--learning_rate 3e-6 --reward_weights 1 1 1 1 --model_name_or_path other --replay_buffer_size 8".split()
    variables = {"DATA": "train=a.parquet", "ACCELERATE_CONFIG": "fsdp2", "NUM_PROCESSES": "3"}
    arguments = launched("experiment3.sh", tmp_path, *flags, **variables)
    assert arguments[:2] == ["launch", "--config_file"]
    assert Path(arguments[2]).is_file()
    data, _, config, model = options(from_training_script(arguments)[1:])
    assert (config.learning_rate, config.reward_weights, config.replay_buffer_size) == (3e-6, [1, 1, 1, 1], 8)
    assert model.model_name_or_path == "other"
    assert data.data_files == "train=a.parquet"
    assert Path(arguments[2]).stem == "fsdp2"
    assert arguments[3:5] == ["--num_processes", "3"]


def test_data_are_converted_and_merged_in_one_command(tmp_path):
    stub(tmp_path, "vgr-trl", f'echo "$*" >> {tmp_path}/commands')
    assert run("../data.sh", tmp_path, "sets", "--subset_size", "9").returncode == 0
    commands = [line.split() for line in (tmp_path / "commands").read_text().splitlines()]
    converted = [make_parser().parse_args(words[1:]) for words in commands[:-1]]
    assert all(words[:2] == ["data", "convert"] for words in commands[:-1])
    assert [flags.source for flags in converted] == ["aokvqa", "arxivqa", "mmmu_pro"]
    assert {flags.subset_size for flags in converted} == {9}
    merged = make_parser().parse_args(commands[-1][1:])
    assert (commands[-1][:2], merged.output_dir) == (["data", "merge"], Path("sets/ddm"))
    assert merged.sets == [str(flags.output_dir) for flags in converted]


def test_several_machines_take_the_gpus_of_all(tmp_path):
    stub(tmp_path, "nvidia-smi", "echo 'GPU 0: one'; echo 'GPU 1: other'")
    variables = {"NUM_MACHINES": "2", "MACHINE_RANK": "1", "MAIN_IP": "10.0.0.1"}
    given = launched("experiment1.sh", tmp_path, **variables)
    expected = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port"
    assert given[3:13] == [*expected.split(), "29500"]
    given = launched("experiment1.sh", tmp_path, **variables, NUM_PROCESSES="3", MAIN_PORT="1234")
    assert (given[4], given[12]) == ("3", "1234")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_folder(folder / "embedded")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_trains_the_embedded_model(script, tiny_folder, tmp_path, monkeypatch):
    flags = "--max_steps 2 --output_dir out".split()
    arguments = launched(script, tmp_path, *flags, TINY="1", TINY_FOLDER=str(tiny_folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", from_training_script(arguments))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert max(entry["grad_norm"] for entry in steps) > 0
    assert all(("replay/size" in entry) is (script != "tprl.sh") for entry in steps)
    assert "eval_reward" in json.loads((tmp_path / "out" / "metrics.json").read_text())
    seen = {name for entry in steps for name in entry}
    assert set(NOTES["traces"].get(script, ["rewards/vgr_reward/mean"])) <= seen


def test_a_check_says_where_a_run_would_fail_and_why(tiny_folder, tmp_path):
    """And asks for everything that a run may measure, whatever the script and the user's flags say."""
    stub(tmp_path, "accelerate", NOTES["fails"])
    words = [str(EXPERIMENTS / "tprl.sh"), "--token_weights", "false", "--max_prompt_length", "99"]
    done = run("check.sh", tmp_path, *words, TINY="1", TINY_FOLDER=str(tiny_folder))
    assert done.returncode == 1
    assert "data          ok      training 8 rows, evaluation none\n" in done.stdout
    assert "every signal  FAILED  vgr-trl train: There is no room.\n" in done.stdout
    _, _, config, _ = options(from_training_script((tmp_path / "given").read_text().splitlines())[1:])
    assert config.max_prompt_length == 99
    assert config.max_steps == config.save_steps == config.eval_steps == 1
    assert all((config.compute_attention_metrics, config.token_weights, config.enable_perception_filtering))
    assert config.replay_buffer_size == 64
    assert run("check.sh", tmp_path, "nothing.sh").returncode == 2
