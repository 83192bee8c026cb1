import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import finish

from vgr_trl import mtrl
from vgr_trl.cli.__main__ import main

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("easyr1.yaml").read_text(encoding="utf-8")
GAE = """
  algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.disable_kl=false algorithm.kl_coef=0.01
  algorithm.enable_token_weights=true worker.critic.optim.lr=1e-5 worker.critic.optim.lr_warmup_steps=1
  worker.actor.optim.lr_warmup_steps=1 worker.actor.fsdp.enable_cpu_offload=true
  worker.critic.fsdp.enable_cpu_offload=true worker.actor.global_batch_size=4 trainer.val_before_train=false
""".split()
SCORE = """
REWARD_TYPE = "batch"
def compute_score(reward_inputs, weight=0.1):
    assert all(row["prompt"].endswith("Think first.") for row in reward_inputs)
    return [{"overall": weight * len(row["response"]), "length": len(row["response"]),
             "token_weights": [1.0 + t for t in range(row["response_length"])]} for row in reward_inputs]
"""
CPU = ("--use_cpu", "--disable_tqdm", "true")


@pytest.fixture
def config(model_folder, question_files, tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "test")
    train, test = (part.split("=")[1] for part in question_files.split(","))
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Think first.")
    (tmp_path / "score.py").write_text(SCORE)
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(train=train, test=test, folder=tmp_path, model=model_folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    sys.modules.pop("score", None)


def test_a_run_of_theirs(config, capsys):
    """Four prompts of four completions and two prompts an update: two of our steps for one of theirs, logged once.

    The file of rewards weighs the t-th token by t, over a mean of 5 / 2 in the longest completions.
    """
    weights = ("algorithm.enable_token_weights=true", "worker.rollout.collect_attentions=true")
    assert main(["train", "--config", str(config), "data.seed=3", *weights, *CPU]) == 0
    printed = capsys.readouterr().out
    assert "worker.actor.optim.lr" in printed
    assert "* " not in printed
    assert re.search(r"and \d+ defaults of EasyR1, which --verbose lists", printed)
    state = json.loads((config.parent / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    logged = next(entry for entry in state["log_history"] if "reward" in entry)
    assert logged["learning_rate"] == 5e-4
    assert logged["token_weight_max"] == pytest.approx(4 / 2.5)
    assert logged["reward"] == pytest.approx(0.1 * logged["reward/length"])
    assert [entry["step"] for entry in state["log_history"] if "eval_reward" in entry] == [0, 2]
    assert "eval_reward" in json.loads((config.parent / "run" / "metrics.json").read_text())


def test_their_entry_point_evaluates_only(config, capsys):
    """Neither flags of a training, which are named, nor what no training could follow stops it."""
    arguments = [f"config={config}", "trainer.val_only=true", "trainer.n_gpus_per_node=8", "worker.rollout.n=1"]
    flags = "--use_cpu --reward_weights 1 2 --blind_baseline false --disable_tqdm=true"
    assert mtrl.main([*arguments, *flags.split()]) == 0
    said = capsys.readouterr()
    assert "Without effect here: use_cpu, reward_weights, disable_tqdm.\n" in said.err
    printed = " ".join(said.out.split())
    assert "compute_score" in printed
    assert "The configuration asks for 8 processes, this run has 1" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["trainer.max_steps=1", *CPU], "returned token_weights, but token_weights is off"),
        (["trainer.save_checkpoint_path=/dev/null", *CPU], "output_dir by trainer.save_checkpoint_path"),
        (["worker.actor.loss_type=dppo", "--ignore_unknown_keys"], "ignoring these would change the training"),
        (["worker.actor.loss_type=dppo", "worker.actor.no_such_key=2"], "the training. worker.actor.no_such_key"),
    ],
)
def test_keys_that_cannot_be_followed_stop_the_run(config, capsys, more, message):
    assert main(["train", "--config", str(config), *more]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("example", ["config", "mtrl"])
def test_an_example_trains(example, model_folder, question_files, tmp_path, monkeypatch, capsys):
    """As the pages start it in a clone; a name that no file has is named before the overrides are read."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("VGR_TRL_LAUNCHED", "WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_vlm").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    links = dict(part.split("=") for part in question_files.split(","))
    for name, target in [(f"{split}.parquet", file) for split, file in links.items()] + [("model", model_folder)]:
        (tmp_path / "tiny_vlm" / name).symlink_to(target)
    steps = "trainer" if example == "config" else "training"
    small = [f"{steps}.max_steps=1", f"{steps}.val_freq=-1", "worker.rollout.n=2", *CPU]
    assert mtrl.main([f"config=examples/{example}.yaml", *small]) == 0
    assert mtrl.main([f"config=examples/no_{example}.yaml", *small]) == 1
    assert f"examples/no_{example}.yaml" in capsys.readouterr().err


@pytest.mark.minutes
def test_a_critic_in_two_processes(config):
    command = [sys.executable, "-m", "vgr_trl.mtrl", f"config={config}", *GAE, "trainer.n_gpus_per_node=2", *CPU]
    done = finish([*command, "worker.rollout.n=2"])
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((config.parent / "run" / "trainer_state.json").read_text())
    logged = next(entry for entry in state["log_history"] if "critic/value_loss" in entry)
    assert logged["critic/grad_norm"] > 0
    assert logged["token_weight_max"] == pytest.approx(4 / 2.5)
    assert state["global_step"] == 1


@pytest.fixture
def launcher(monkeypatch):
    started = []
    for name in ("LOCAL_RANK", "RANK", "VGR_TRL_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))

    def launch(command, environment):
        started.append(command)
        monkeypatch.setenv("VGR_TRL_LAUNCHED", environment["VGR_TRL_LAUNCHED"])
        return 0

    monkeypatch.setattr(mtrl, "launch", launch)
    monkeypatch.setattr(mtrl, "run_command", lambda arguments: started.append(arguments) or 0)
    return started


@pytest.mark.parametrize(
    ("more", "expected", "absent"),
    [
        (["worker.actor.offload.offload_optimizer=true"],
         "--fsdp_reshard_after_forward true --fsdp_offload_params true", "--multi_gpu"),
        (["worker.actor.fsdp.sharding_strategy=SHARD_GRAD_OP"],
         "--fsdp_reshard_after_forward false --fsdp_offload_params false", "--multi_gpu"),
        (["worker.actor.fsdp.sharding_strategy=NO_SHARD"], "--multi_gpu", "fsdp"),
        (GAE, "--multi_gpu", "fsdp"),
        ([*GAE, "--critic", "head"], "--use_fsdp", "--multi_gpu"),
    ],
)  # fmt: skip
def test_processes_are_started_as_the_configuration_asks(config, launcher, more, expected, absent):
    given = [f"config={config}", *more, "trainer.n_gpus_per_node=8"]
    assert mtrl.main(given) == mtrl.main(given) == 0
    command, arguments = launcher
    words, _, own = " ".join(command).partition(" -m vgr_trl.mtrl ")
    assert "--num_processes 8" in words
    assert expected in words
    assert absent not in words
    assert (own, arguments) == (" ".join(given), ["train", f"--{given[0]}", *given[1:]])


def test_nothing_is_started_that_cannot_train(config, launcher, monkeypatch, capsys):
    """7.6 billion parameters in float32, of policy and critic, with gradients and moments: 226 GiB for a GPU."""
    monkeypatch.setattr("vgr_trl.cli.evaluate.count_parameters", lambda name: 7_600_000_000)
    given = [f"config={config}", "trainer.n_gpus_per_node=8"]
    for more, message in (
        (GAE, "= 226 GiB, but a GPU has 75 GiB"),
        (["trainer.no_such_key=1"], "trainer.no_such_key is"),
    ):
        assert mtrl.main([*given, *more]) == 1
        assert message in capsys.readouterr().err
    assert launcher == []
    assert mtrl.main([*given, *GAE, "--critic", "head"]) == 0


def test_sigterm_reaches_the_processes(tmp_path):
    trap = f"trap 'touch {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/ready; while true; do sleep 0.05; done"
    code = f"import os, sys; from vgr_trl import mtrl; sys.exit(mtrl.launch(['bash', '-c', {trap!r}], os.environ))"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (tmp_path / "ready").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        parent.terminate()
        assert parent.wait(60) == 143
    assert (tmp_path / "saved").exists()
