"""Kills a run at every file boundary of its saves, by the injector of ckpt-chaos, and judges by its rules.

chaos_driver.py MODEL QUESTIONS FOLDER ENGINE REPLAY MOST    at most so many points of each process; 0: all

Runs are forks of this process, which has imported everything. A run saves after each of two steps and the model at the
end. Its folder is `out` wherever it is, and times are left out of logs: by the sizes of files of an undisturbed run,
and not by this library, a checkpoint is complete here. Written: `verdicts.json`, a list of [point, verdict, what
happened]. Verdicts are those of ckpt-chaos, and FINISHED of a kill after the last checkpoint, which is refused as
finished and has the model of the undisturbed run.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from ckpt_chaos.inject import arm
from ckpt_chaos.invariants import ResumeOutcome, classify

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import engines
import torch
from support.launching import held_port
from support.trainers import config, letters_reward, prompts, vision_trainer, whole_parameters
from transformers import TrainerCallback

from vgr_trl.checkpoints import resolve_checkpoint

KILLED = 137
STEPS = 2
FINISHED = "The run is finished"  # said of a checkpoint that has all steps behind it: it has the model of the run
LOGGED = ("step", "loss", "reward")
GRACE = 3.0  # seconds between the end of one process and that of the others, as ckpt-chaos has it


class Begin(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            Path("began").write_text(str(state.global_step))

    def on_log(self, args, state, control, **kwargs):
        state.log_history[-1] = {name: value for name, value in state.log_history[-1].items() if name in LOGGED}


def train(data: tuple[str, str], kind: str, replay: int) -> None:
    options = config(
        "out", max_steps=STEPS, save_strategy="steps", save_steps=1, replay_buffer_size=replay, rollout_log_steps=0,
        compute_attention_metrics=False, per_device_train_batch_size=4, optim="adamw_torch",
        **engines.options_of(kind),
    )  # fmt: skip
    trainer = vision_trainer(data[0], letters_reward, options, prompts(data[1]), model=data[0])
    trainer.add_callback(Begin())
    checkpoint = resolve_checkpoint("latest", Path("out"))
    lacks_its_model = trainer.lacks_final_model_only(checkpoint, STEPS, Path("out", "last"))
    trainer.accelerator.wait_for_everyone()  # all have looked for it
    if lacks_its_model:
        trainer.load_trained(checkpoint)
        Path("began").write_text(str(STEPS))
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model("out")
    weights = whole_parameters(trainer)
    if trainer.is_world_process_zero():
        Path("out", "last").write_text("all is there")
        torch.save(weights, "weights.pt")


def run(folder: Path, data, kind: str, replay: int, point: tuple[int, int, str] | None = None) -> list[int]:
    """Run in forks; the status of each process. `point`: a process, the number of its file event, the kill's mode."""
    folder.mkdir(exist_ok=True)
    ended: dict[int, int] = {}
    processes, end = 1 if kind == "one" else 2, None
    with held_port() as port:
        started = [_fork(folder, data, kind, replay, point, rank, processes, port) for rank in range(processes)]
        while len(ended) < len(started):
            for rank, pid in enumerate(started):
                if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[rank] = os.waitstatus_to_exitcode(found[1])
            if any(ended.values()) and end is None:
                end = time.monotonic() + GRACE
            if end is not None and time.monotonic() > end:
                for rank in set(range(len(started))) - set(ended):
                    os.kill(started[rank], signal.SIGKILL)
                end = float("inf")
            time.sleep(0.02)
    return [ended[rank] for rank in range(len(started))]


def _fork(folder, data, kind, replay, point, rank, processes, port) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.chdir(folder)
        with open(f"said_{rank}", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ.update(engines.VARIABLES[kind])
        if processes > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(processes))
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        engines.prepare(kind)
        crash, mode = point[1:] if point is not None and point[0] == rank else (None, "before")
        if point is not None or not Path("out").exists():
            arm(os.path.abspath("out"), crash, mode, log_path=os.path.abspath(f"events_{rank}"), torn_python=True)
        train(data, kind, replay)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def newest_complete(whole: Path, folder: Path) -> int:
    for step in range(STEPS, 0, -1):
        files = (where / f"out/checkpoint-{step}" for where in (whole, folder))
        expected, found = ({path.relative_to(at): path.stat().st_size for path in at.rglob("*")} for at in files)
        if found == expected:
            return step
    return 0


def points_of(whole: Path, rank: int, most: int) -> list[tuple[int, int, str, str]]:
    """Process, number, mode and name of its file events in the undisturbed run; torn files come last."""
    points = []
    for line in (whole / f"events_{rank}").read_text().splitlines():
        number, kind, name, tornable = line.split("\t")
        modes = ["before", "torn"] if tornable == "1" else ["before"]
        points += [(rank, int(number), mode, f"{kind}:{name}") for mode in modes]
    points.sort(key=lambda point: point[2])
    return points if not most or len(points) <= most else [points[int(i * len(points) / most)] for i in range(most)]


def judge(whole: Path, folder: Path, data, kind: str, replay: int, point: tuple[int, int, str]) -> tuple[str, str]:
    killed = run(folder, data, kind, replay, point)
    if killed[point[0]] != KILLED:
        return "NOT_KILLED", f"{killed}: {(folder / f'said_{point[0]}').read_text()[-2000:]}"
    newest = newest_complete(whole, folder)
    ended = run(folder, data, kind, replay)
    if any(ended):
        said = (folder / "said_0").read_text()[-2000:]
        one, other = (where / f"out/checkpoint-{STEPS}/model.safetensors" for where in (whole, folder))
        if FINISHED in said and newest == STEPS and one.read_bytes() == other.read_bytes():
            return "FINISHED", f"{newest} of {STEPS} steps, the model of the checkpoint as undisturbed"
        return classify(ResumeOutcome(f"status {ended}", None, newest, None)), said
    expected, found = (torch.load(where / "weights.pt") for where in (whole, folder))
    apart = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    began = int((folder / "began").read_text())
    return classify(ResumeOutcome(None, began, newest, apart)), f"from {began} of {newest}, {apart} apart"


if __name__ == "__main__":
    data, folder = (sys.argv[1], sys.argv[2]), Path(sys.argv[3])
    kind, replay, most = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(1)
    whole = folder / "whole"
    verdicts, status = [], run(whole, data, kind, replay)
    assert not any(status), (whole / "said_0").read_text()[-3000:]
    for rank in range(len(status)):
        for number, point in enumerate(points_of(whole, rank, most)):
            verdict = judge(whole, folder / f"{rank}_{number}", data, kind, replay, point[:3])
            verdicts.append([f"process {rank}, event {point[1]} {point[3]} {point[2]}", *verdict])
            print(*verdicts[-1][:2], verdict[1][-300:], flush=True)
            (folder / "verdicts.json").write_text(json.dumps(verdicts))
