"""SIGKILL in generation, scoring, backward, optimizer and evaluation, of one process of two and of both.

As a script it is the run that is killed: MODEL QUESTIONS OUTPUT, with DIES="phase step rank" (rank: or all). It
continues where it can. Written at the end: losses, rewards of evaluations and sums of the weights.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import complete_checkpoints
from support.launching import SECONDS, environment, launch
from support.trainers import config, letters_reward, logged, prompts, train_file, vision_trainer
from transformers import TrainerCallback

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
PHASES = ("generation", "scoring", "backward", "optimizer", "evaluation")
OPTIONS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 7, "save_strategy": "steps",
    "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
    "num_generations_eval": 2, "token_weights": True, "replay_buffer_size": 4, "rollout_log_steps": 1,
}  # fmt: skip


class Dies(TrainerCallback):
    """Kills this process in the midst of a phase, if it is the one and the step is the one."""

    def __init__(self, trainer) -> None:
        self.trainer, self.decodes = trainer, False  # whether the pass before was one of generation
        trainer.model.model.language_model.norm.register_forward_hook(self.on_pass)
        first = next(value for value in trainer.model.parameters() if value.requires_grad)
        first.register_hook(lambda gradient: self.at("backward"))
        trainer.add_callback(self)

    def at(self, phase: str) -> None:
        where, step, who = os.environ.get("DIES", "nowhere 0 all").split()
        is_now = (where, int(step)) == (phase, self.trainer.state.global_step + 1)
        if is_now and who in ("all", os.environ.get("RANK", "0")):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_pass(self, module, args, output) -> None:
        if output.size(1) == 1:  # some tokens are there
            self.at("generation" if self.trainer.model.training else "evaluation")
        elif self.decodes and self.trainer.model.training and not torch.is_grad_enabled():
            self.at("scoring")
        self.decodes = output.size(1) == 1

    def on_optimizer_step(self, *args, **kwargs) -> None:
        self.at("optimizer")


@pytest.mark.minutes
@pytest.mark.parametrize("who", ["1", "all"])
def test_processes_that_are_killed_in_each_phase(who, model_folder, question_files, tmp_path):
    """One run, which dies in another phase each time it is continued, and goes on from what is complete.

    Where one process dies, the other ends with a sentence, or by the launcher, which ends all.
    """
    data, said = (str(model_folder), train_file(question_files)), ""
    launch(Path(__file__), *data, tmp_path / "whole", processes=2)
    for step, phase in enumerate(PHASES, start=2):
        command = [*TORCHRUN, str(Path(__file__)), *data, str(tmp_path / "killed")]
        more = environment(ACCELERATE_USE_CPU="true", DIES=f"{phase} {step} {who}")
        run = subprocess.run(command, env=more, capture_output=True, text=True, timeout=SECONDS)
        assert run.returncode != 0
        assert "SIGKILL" in run.stderr, run.stderr[-3000:]
        said += run.stderr
    if who == "1":
        assert "ProcessError: Another of the 2 processes has ended, or" in said
    launch(Path(__file__), *data, tmp_path / "killed", processes=2)
    found, expected = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "whole"))
    assert len(found["losses"]) == len(found["evaluations"]) == OPTIONS["max_steps"]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-5), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    output = Path(sys.argv[3])
    rows = prompts(sys.argv[2])
    batch = OPTIONS["per_device_train_batch_size"] * 2 // int(os.environ.get("WORLD_SIZE", 1))
    options = config(output, **OPTIONS | {"per_device_train_batch_size": batch})
    trainer = vision_trainer(sys.argv[1], letters_reward, options, rows, rows.select(range(4)))
    Dies(trainer)
    trainer.train(resume_from_checkpoint=bool(complete_checkpoints(output)))
    if trainer.is_world_process_zero():
        sums = [value.double().sum().item() for value in trainer.model.parameters()]
        result = {"losses": logged(trainer, "loss"), "evaluations": logged(trainer, "eval_reward"), "weights": sums}
        (output / "result.json").write_text(json.dumps(result))
