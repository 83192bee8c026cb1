import io
import json
import logging
import re
import socket
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from datasets import load_dataset
from filelock import FileLock
from huggingface_hub import constants
from huggingface_hub.utils import _telemetry
from support.launching import results_of

from vgr_trl.callbacks.trackers import Bar, step_line
from vgr_trl.checkpoints import LOCK, resolve_checkpoint
from vgr_trl.cli.__main__ import main
from vgr_trl.cli.train import check_output_dir
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.convert import train_test_split
from vgr_trl.errors import ConfigError

HUB = Path("lujunxi57") / "DDM"
RUN = {"model": "m", "data": "d", "reward_funcs": ["accuracy"]}
DRY = """--dry_run --use_cpu true --bf16 false --num_generations 4 --max_completion_length 6 --num_train_epochs 3
    --token_weights --output_dir run --gradient_accumulation_steps 4"""


def test_a_finished_run_of_trl_and_a_file_are_refused_too(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for folder in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ConfigError):
            check_output_dir(folder, RUN, None)
    with pytest.raises(ConfigError):
        resolve_checkpoint("latest", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for text in ("[1]", "{", "7"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError):
            check_output_dir(tmp_path, RUN, "latest")


@pytest.fixture
def rows(question_files):
    return load_dataset("parquet", data_files=question_files.split(",")[0].split("=")[1], split="train")


@pytest.fixture
def train(model_folder, tmp_path, monkeypatch, capsys):
    """Train one step; a folder of the name of a hub data set stands for the hub, as `datasets` has it."""
    monkeypatch.chdir(tmp_path)

    def run(*flags, status=0):
        fixed = (
            f"--model_name_or_path {model_folder} --output_dir out --use_cpu --bf16 false --save_strategy no "
            "--gradient_checkpointing false --per_device_train_batch_size 4 --per_device_eval_batch_size 4 "
            "--num_generations 4 --max_completion_length 4 --max_steps 1 --logging_steps 1 --report_to none "
            "--disable_tqdm true --system_prompt_file none"
        )
        assert main(["train", *fixed.split(), *flags]) == status
        out, err = capsys.readouterr()
        metrics = tmp_path / "out" / "metrics.json"
        return " ".join((out + err).split()), metrics.exists() and "eval_reward" in json.loads(metrics.read_text())

    return run


def save(rows, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(file)


@pytest.mark.parametrize(
    ("validation", "note", "counts"),
    [
        (0, "The data have no test split: 1 of 16 rows are held out for evaluation", (15, 1)),
        (3, "The data have no test split: evaluating on validation.", (16, 1)),
    ],
)
def test_a_hub_data_set_without_test(train, rows, tmp_path, validation, note, counts):
    """A tenth of the 16 rows is two; the second is trained on where only one is evaluated."""
    save(rows.select(range(16)), tmp_path / HUB / "train.parquet")
    if validation:
        save(rows.select(range(validation)), tmp_path / HUB / "validation.parquet")
    flags = f"--dataset_name {HUB} --eval_strategy steps --eval_steps 1 --max_test_rows 1"
    printed, is_evaluated = train(*flags.split())
    assert note in printed
    assert "training {} rows, evaluation {} rows".format(*counts) in printed
    assert is_evaluated


@pytest.mark.parametrize("is_local", [True, False])
def test_a_run_from_local_files_looks_up_no_host(train, question_files, is_local, monkeypatch):
    """The download counter of datasets asks s3.amazonaws.com, TRL's telemetry asks huggingface.co."""
    hosts = []

    def look_up(host, *_, **__):
        hosts.append(str(host))
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("CI", raising=False)
    for owner, name in ((datasets.config, "HF_HUB_OFFLINE"), (constants, "HF_HUB_OFFLINE")):
        monkeypatch.setattr(owner, name, False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    test = question_files.split("test=")[1] if is_local else str(HUB)
    train("--data_files", question_files, "--test_dataset", test)
    _telemetry._TELEMETRY_QUEUE.join()
    assert set(hosts) == (set() if is_local else {"s3.amazonaws.com", "huggingface.co"})


def test_text_alone_trains_on_the_default_rewards(train, tmp_path):
    (tmp_path / "text.jsonl").write_text("\n".join(['{"question": "what", "answer": "red"}'] * 8))
    printed, _ = train("--data_files", "text.jsonl")
    assert "training 8 rows, evaluation none" in printed
    assert "vgr_reward" not in printed
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == {}


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_second_run_in_a_folder_changes_nothing_in_it(train, tmp_path, monkeypatch, command):
    """One of its rows cannot be used, which a run lists in a file."""
    monkeypatch.setattr("vgr_trl.checkpoints.LOCK_SECONDS", 0)
    (tmp_path / "out").mkdir()
    for name in ("run.json", "metrics.json"):
        (tmp_path / "out" / name).write_text('{"of": "the first run"}')
    (tmp_path / "text.jsonl").write_text("\n".join(['{"question": "what", "answer": "red"}'] * 8 + ["{}"]))
    with FileLock(tmp_path / "out" / LOCK):
        if command == "train":
            train("--data_files", "text.jsonl", status=1)
        else:
            assert main(["demo", "--output_dir", "out", "--steps", "1"]) == 1
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.name != LOCK}
    assert texts == dict.fromkeys(("run.json", "metrics.json"), '{"of": "the first run"}')


def test_rows_that_share_an_image_stay_on_one_side(rows):
    prepared, _ = prepare_rows(rows.select([number % 5 for number in range(20)]))
    for seed in range(4):
        left, right = train_test_split(prepared, seed)
        images = [{row["image"].tobytes() for row in side} for side in (left, right)]
        assert not images[0] & images[1]
        assert (len(left), len(right)) == (16, 4)  # an image has four rows, the smallest share above none


def check_dry_run(printed):
    """16 rows in rollouts of 4 prompts, 3 epochs; of the small rollout 2 completions of each of 3 prompts are shown."""
    assert len(re.findall(r"^prompt \d: \d+x\d+ px, \d+x\d+ tokens", printed, re.M)) == 3
    assert printed.count("step 1, prompt") == 6, "of the second step, which is timed"
    assert printed.count("accuracy_reward") == 7, "in the plan too"
    assert "measured: 12 completions of at most 6 tokens" in printed
    assert "for 12 steps of 16 completions" in printed


def test_a_dry_run_shows_three_prompts_and_writes_nothing(model_folder, question_files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"""train --model_name_or_path {model_folder} --data_files {question_files} {DRY} --save_steps 1
        --per_device_train_batch_size 4 --eval_strategy steps --log_completions --rollout_log_path rollouts.md"""
    assert main(flags.split()) == 0
    check_dry_run(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


def dry_run(flags):
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["train", *flags.split()]) == 0
    return printed.getvalue()


@pytest.mark.minutes
def test_two_processes_show_what_one_run_would_take(model_folder, question_files, tmp_path, monkeypatch):
    """2 completions on each process, groups of 4: three rounds are three prompts, each of which is on both."""
    monkeypatch.chdir(tmp_path)
    flags = f"--model_name_or_path {model_folder} --data_files {question_files} {DRY} --per_device_train_batch_size 2"
    first, second = results_of(dry_run, flags, processes=2)
    check_dry_run(first)
    assert "prompt" not in second
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_step_line_fits_the_terminal_and_keeps_what_matters_most(columns):
    logs = {
        "reward": -0.5123, "rewards/accuracy_reward/mean": 0.0625, "rewards/think_format_reward/mean": 0.4375,
        "rewards/my_own_reward/mean": 0.25, "completions/mean_length": 1024.3, "attention/late/vgr": 0.787,
        "sampling/nonzero_variance_fraction": 1.0, "loss": -0.0511,
    }  # fmt: skip
    line = step_line(99, 10_000, logs, 12.3, columns)
    assert len(line) <= columns
    assert line.startswith("step    99/10000  reward -0.512  accuracy 0.062")
    assert line.endswith("33 h 50 left")
    assert ("loss" in line) == ("my_own" in line) == (columns == 200)


def test_log_messages_stand_above_the_progress_bar(capsys):
    """Behind it, they would continue its line."""
    bar, state = Bar(), SimpleNamespace(is_world_process_zero=True, max_steps=3, global_step=0)
    bar.on_train_begin(None, state, None)
    bar.training_bar.refresh()
    logging.getLogger("vgr_trl").warning("a message")
    bar.on_train_end(None, state, None)
    assert re.search(r"(^|[\n\r])a message\n", capsys.readouterr().err)
