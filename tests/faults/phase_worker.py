"""A run that is killed in a phase: phase_worker.py MODEL QUESTIONS OUTPUT, with DIES="phase step rank" (rank: or all).

It continues where it can. Written at the end: losses, rewards of evaluations and sums of the weights.
"""

import json
import os
import signal
import sys
from functools import wraps
from pathlib import Path

import torch
from support.checkpoints import complete_checkpoints
from support.trainers import config, letters_reward, logged, prompts, vision_trainer

PHASES = ("generation", "scoring", "backward", "optimizer", "evaluation")
OPTIONS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 7, "save_strategy": "steps",
    "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
    "num_generations_eval": 2, "token_weights": True, "replay_buffer_size": 4, "rollout_log_steps": 1,
}  # fmt: skip


def dies(phase: str, step: int) -> None:
    """Kill this process in the midst of a phase, if it is the one and the step is the one."""
    where, when, who = os.environ.get("DIES", "nowhere 0 all").split()
    if (where, int(when)) == (phase, step) and who in ("all", os.environ.get("RANK", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_phases(trainer) -> None:
    model, now = trainer.model, {"generates": 0, "evaluates": 0}

    def counting(name, method):
        @wraps(method)
        def counted(*args, **kwargs):
            now[name] = 1
            found = method(*args, **kwargs)
            now[name] = 0
            return found

        return counted

    def passes(module, args, output):
        step = trainer.state.global_step + 1
        if now["generates"]:
            now["generates"] += 1
            if now["generates"] > 3:  # some tokens are there
                dies("evaluation" if now["evaluates"] else "generation", step)
        elif model.training and not torch.is_grad_enabled():
            dies("scoring", step)

    model.model.language_model.norm.register_forward_hook(passes)
    model.generate = counting("generates", model.generate)
    trainer.evaluate = counting("evaluates", trainer.evaluate)
    first = next(value for value in model.parameters() if value.requires_grad)
    first.register_hook(lambda gradient: dies("backward", trainer.state.global_step + 1))
    create = trainer.create_optimizer

    def creates(*args, **kwargs):
        optimizer = create(*args, **kwargs)
        optimizer.register_step_post_hook(lambda *_: dies("optimizer", trainer.state.global_step + 1))
        return optimizer

    trainer.create_optimizer = creates


if __name__ == "__main__":
    torch.set_num_threads(1)
    output = Path(sys.argv[3])
    rows = prompts(sys.argv[2])
    batch = OPTIONS["per_device_train_batch_size"] * 2 // int(os.environ.get("WORLD_SIZE", 1))
    options = config(output, **OPTIONS | {"per_device_train_batch_size": batch})
    trainer = vision_trainer(sys.argv[1], letters_reward, options, rows, rows.select(range(4)))
    kill_in_phases(trainer)
    trainer.train(resume_from_checkpoint=bool(complete_checkpoints(output)))
    if trainer.is_world_process_zero():
        sums = [value.double().sum().item() for value in trainer.model.parameters()]
        result = {"losses": logged(trainer, "loss"), "evaluations": logged(trainer, "eval_reward"), "weights": sums}
        (output / "result.json").write_text(json.dumps(result))
