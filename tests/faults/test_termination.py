"""SIGTERM as from a scheduler: the step is saved, the status says so, and the run goes on from there."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from support.checkpoints import complete_checkpoints
from support.commands import ROOT, finish, train_command
from support.launching import children_of, environment, outputs, wait_for_line
from support.trainers import train_file
from transformers import TrainerControl

from vgr_trl import callbacks as termination

OF_TWO = [pytest.param(2, asked, "", marks=pytest.mark.minutes) for asked in ("child", "all")]


@pytest.mark.parametrize(("processes", "asked", "flags"), [*OF_TWO, (1, "all", "--dataloader_num_workers 1")])
def test_a_run_that_is_asked_to_end_saves_and_goes_on(processes, asked, flags, model_folder, question_files, tmp_path):
    """A launcher that gets the signal hands it on, so that its processes get it twice."""
    output = tmp_path / "run"
    launcher = "-m torch.distributed.run --standalone --nproc_per_node=2" if processes > 1 else ""
    batch = f"--per_device_train_batch_size {8 // processes} --save_strategy no --max_steps"

    def command(more):
        return train_command(model_folder, train_file(question_files), output, f"{batch} {more}", launcher)

    run = subprocess.Popen(
        command(f"1000 {flags}"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(ACCELERATE_USE_CPU="true", PYTHONUNBUFFERED="1", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="900"),
    )  # fmt: skip
    wait_for_line(run, "step    3/1000")
    children = children_of(run)
    for pid in {"run": [run.pid], "child": children[:1], "all": [*children, run.pid]}[asked]:
        os.kill(pid, signal.SIGTERM)
    ((said, errors),) = outputs(run)
    assert "Stopped by SIGTERM at step" in said, errors[-3000:]
    assert (run.returncode == 143) if processes == 1 else run.returncode != 0
    (checkpoint,) = complete_checkpoints(output)
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 3 <= step < 1000
    assert not (output / "model.safetensors").exists()
    rest = finish(command(f"{step + 1} --resume_from_checkpoint"), ACCELERATE_USE_CPU="true")
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == step + 1


def test_workers_of_a_killed_run_end(model_folder, question_files, tmp_path):
    """The worker has filled its queue, which nobody reads any more, and passes over SIGTERM."""
    flags = "--save_strategy no --max_steps 1000 --dataloader_num_workers 1 --dataloader_prefetch_factor 50"
    command = train_command(model_folder, train_file(question_files), tmp_path, flags)
    env = environment(ACCELERATE_USE_CPU="true", PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as run:
        wait_for_line(run, "step    3/1000")
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


def test_a_training_that_fails_leaves_signals_as_they_were_and_one_in_a_thread_takes_none(text_trainer):
    def reward(completions, **kwargs):
        raise KeyError("of the user")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError):
        text_trainer(reward, max_steps=1).train()
    assert signal.getsignal(signal.SIGTERM) == before
    trainer = text_trainer(max_steps=1)
    with ThreadPoolExecutor() as threads:
        threads.submit(trainer.train).result()
    assert trainer.state.global_step == 1


def test_a_second_signal_ends_the_process_unless_it_belongs_to_the_first(monkeypatch):
    now, raised = [100.0], []
    monkeypatch.setattr(termination.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(termination.signal, "raise_signal", raised.append)
    callback = termination.SaveOnTermination(SimpleNamespace(device="cpu", gather=lambda asked: asked))
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
        callback.on_train_end(None, None, None)
