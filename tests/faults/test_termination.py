"""SIGTERM, SIGSTOP and kills after the last step: what is saved, what the status says, and that the run goes on."""

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file
from support.commands import ROOT, complete_checkpoints, finish, train_command
from support.launching import children_of, environment, outputs, wait_for_line
from support.trainers import logged, train_file
from torch import distributed
from transformers import TrainerControl

from vgr_trl.callbacks import stopping
from vgr_trl.errors import ProcessError, RewardError
from vgr_trl.processes import naming_silent_process

CPU = {"ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1"}
OF_TWO = [pytest.param(2, asked, "", marks=pytest.mark.minutes) for asked in ("child", "all")]


@pytest.fixture
def command(model_folder, question_files, tmp_path):
    def make(flags, processes=1):
        launcher = "-m torch.distributed.run --standalone --nproc_per_node=2" if processes > 1 else ""
        flags = f"--per_device_train_batch_size {8 // processes} {flags}"
        return train_command(model_folder, train_file(question_files), tmp_path / "run", flags, launcher)

    return make


def begin(command, **variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, cwd=ROOT, text=True, env=environment(**CPU, **variables), **pipes)
    wait_for_line(run, "step    3/1000")
    return run


def check_continues(command, processes, output):
    step = int(complete_checkpoints(output)[-1].name.removeprefix("checkpoint-"))
    assert 2 <= step < 1000
    rest = finish(command(f"--save_steps 1000 --max_steps {step + 1} --resume_from_checkpoint", processes), **CPU)
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == step + 1


@pytest.mark.parametrize(("processes", "asked", "flags"), [*OF_TWO, (1, "all", "--dataloader_num_workers 1")])
def test_a_run_that_is_asked_to_end_saves_and_goes_on(processes, asked, flags, command, tmp_path):
    """A launcher that gets the signal hands it on, so that its processes get it twice."""
    run = begin(
        command(f"--save_strategy no --max_steps 1000 {flags}", processes), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="900"
    )
    children = children_of(run)
    for pid in children[:1] if asked == "child" else [*children, run.pid]:
        os.kill(pid, signal.SIGTERM)
    ((said, errors),) = outputs(run)
    assert "Stopped by SIGTERM at step" in said, errors[-3000:]
    assert (run.returncode == 143) if processes == 1 else run.returncode != 0
    assert len(complete_checkpoints(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "model.safetensors").exists()
    check_continues(command, processes, tmp_path / "run")


@pytest.mark.minutes
def test_a_process_that_is_stopped(command, tmp_path):
    seconds = 30  # more than one process ever waits for the other on a machine that does much else
    run = begin(command(f"--save_steps 2 --ddp_timeout {seconds} --max_steps 1000", processes=2))
    processes = children_of(run)
    os.kill(processes[1], signal.SIGSTOP)
    ((_, errors),) = outputs(run)
    assert run.returncode != 0
    said = rf"vgr-trl train: Another of the 2 processes .* not answered for ddp_timeout={seconds} seconds, at step \d+"
    assert re.search(said, errors), errors[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    check_continues(command, 2, tmp_path / "run")


@pytest.mark.minutes
def test_a_model_that_was_not_written_is_written_and_a_finished_run_is_refused(command, tmp_path):
    output, again = tmp_path / "run", command("--max_steps 2 --save_steps 1 --resume_from_checkpoint")
    assert finish(again).returncode == 0
    weights = {name: value.clone() for name, value in load_file(output / "model.safetensors").items()}
    metrics = json.loads((output / "metrics.json").read_text())
    finished = finish(again)
    assert finished.returncode == 1
    assert "The run is finished: " in finished.stderr
    (output / "metrics.json").unlink()  # as of a run that is killed while it writes its model
    (output / "model.safetensors").write_bytes(b"torn")
    killed = finish(again)
    assert killed.returncode == 0, killed.stderr[-3000:]
    written = load_file(output / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(bool((value == weights[name]).all()) for name, value in written.items())
    assert json.loads((output / "metrics.json").read_text()) == metrics
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2


def test_workers_of_a_killed_run_end(command):
    """The worker has filled its queue, which nobody reads any more, and passes over SIGTERM."""
    flags = "--save_strategy no --max_steps 1000 --dataloader_num_workers 1 --dataloader_prefetch_factor 50"
    with begin(command(flags)) as run:
        workers = psutil.Process(run.pid).children()
        assert workers
        run.kill()
    _, left = psutil.wait_procs(workers, timeout=30)
    for each in left:
        each.kill()
    assert not left


def test_a_signal_to_a_trainer_saves_and_goes_to_the_users_handler(text_trainer, tmp_path):
    """The trainer is built in Python, and trained twice: the second training does not remember the signal."""
    heard = []

    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and not heard:
            signal.raise_signal(signal.SIGTERM)
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    def handler(number, frame):
        heard.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        trainer = text_trainer(reward, max_steps=3)
        trainer.train()
        assert (trainer.state.global_step, trainer.termination.stopped, heard) == (2, True, [signal.SIGTERM])
        assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
        trainer.train()
        assert (trainer.state.global_step, trainer.termination.stopped) == (3, False)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("saves", ["steps", "best"])
def test_a_signal_during_an_evaluation_ends_it_after_its_batch(text_trainer, text_rows, tmp_path, saves):
    judged = []

    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1:
            judged.append(len(completions))
        if len(judged) == 1:
            signal.raise_signal(signal.SIGTERM)
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    trainer = text_trainer(
        reward, eval_rows=text_rows, max_steps=3, num_generations_eval=2, eval_strategy="steps", eval_steps=1,
        save_strategy=saves, save_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert (trainer.state.global_step, trainer.termination.stopped, judged) == (1, True, [8])
    assert logged(trainer, "eval_reward") == []
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    assert "eval_reward" in trainer.evaluate()


def test_a_training_that_fails_leaves_signals_as_they_were_and_one_in_a_thread_takes_none(text_trainer):
    def reward(completions, **kwargs):
        raise KeyError("of the user")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RewardError, match="The reward reward raised KeyError: 'of the user'"):
        text_trainer(reward, max_steps=1).train()
    assert signal.getsignal(signal.SIGTERM) == before
    trainer = text_trainer(max_steps=1)
    with ThreadPoolExecutor() as threads:
        threads.submit(trainer.train).result()
    assert trainer.state.global_step == 1


def test_a_second_signal_ends_the_process_unless_it_belongs_to_the_first(monkeypatch):
    now, raised = [100.0], []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.signal, "raise_signal", raised.append)
    callback = stopping.SaveOnTermination(SimpleNamespace(device="cpu", gather=lambda asked: asked))
    callback.on_train_begin(None, None, None)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        for at in (100.0, 101.0, 109.0):
            now[0] = at
            handler(signal.SIGTERM, None)
        callback.on_step_end(None, None, control := TrainerControl())
        assert (control.should_save, control.should_training_stop, raised) == (True, True, [])
        now[0] = 111.0
        handler(signal.SIGTERM, None)
        assert raised == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        callback.restore_handler()


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800ms for recv operation", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 60 ms", True),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclRemoteError: A call failed possibly due to", True),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclInvalidUsage: This usually reflects invalid usage", False),
        ("CUDA out of memory. Connection refused", False),
    ],
)
def test_errors_of_backends(message, is_lost, monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError) as raised, naming_silent_process(60, lambda: 4):
        raise RuntimeError(message)
    if is_lost:
        assert isinstance(raised.value, ProcessError)
        assert "2 processes has ended, or has not answered for ddp_timeout=60 seconds, at step 4" in str(raised.value)
    else:
        assert str(raised.value) == message
