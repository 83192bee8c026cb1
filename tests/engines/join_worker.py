"""Run by test_joined_groups.py in the processes of an engine: three steps with micro-batches of one or of a group.

join_worker.py KIND MODEL QUESTIONS OUTPUT NAME OPTIONS      OPTIONS: JSON; "lora" adapts the model
"""

import json
import os
import sys
from functools import partialmethod
from pathlib import Path

import engines
import torch
from accelerate import PartialState
from engine_worker import Case, trainer_of
from support.trainers import logged, whole_parameters


def reward(completions, **kwargs):
    return [sum(map(ord, str(completion))) % 13 for completion in completions]


def main() -> None:
    kind, *data, folder, name, options = sys.argv[1:]
    engines.prepare(kind)
    options = {"attention_reward_scale": "none", "gradient_checkpointing": True, "check_pixels": False} | json.loads(
        options
    )
    if "deepspeed" in options:  # where transformers does not hand on ddp_backend
        PartialState.__init__ = partialmethod(PartialState.__init__, backend="gloo")
    case = Case({}, (reward,), lora=options.pop("lora"))
    trainer = trainer_of(kind, case, tuple(data), Path(folder) / name, **options)
    start = whole_parameters(trainer)
    trainer.train()
    end = whole_parameters(trainer)
    if os.environ.get("RANK", "0") == "0":
        engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
        found = {
            "engine": engines.found_engine(trainer), "joined": trainer.rows_per_pass.joined,
            "prompts_per_row": logged(trainer, "sharing/prompts_per_row"),
            "micro_batch": engine and [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()],
        }  # fmt: skip
        (Path(folder) / f"{name}.json").write_text(json.dumps(found))
        torch.save({each: end[each] - start[each] for each in start}, Path(folder) / f"{name}.pt")


main()
