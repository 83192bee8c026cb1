"""Run by the test of TRL's vision scripts: what they do with the flags of their commands, for two steps each.

trl_script_worker.py KIND MODEL QUESTIONS OUTPUT RUNS     RUNS: JSON of name -> [trainer, whether it shares, flags]
"""

import json
import os
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import engines
import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from support.steps import reports_by_place
from support.trainers import prompts, whole_parameters
from transformers import AutoProcessor
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import accuracy_reward, think_format_reward

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.shared_forward import SharedForward
from vgr_trl.trainer import DAPOTrainer

TRAINERS = {
    "DAPO": (DAPOTrainer, DAPOConfig),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
}


def rows_of(file: str) -> Dataset:
    rows = [{name: row[name] for name in ("prompt", "image", "solution")} for row in prompts(file)]
    for row in rows:
        row["prompt"] = [{"role": "system", "content": "Think first."}, *row["prompt"]]
    return Dataset.from_list(rows)


def spread_reward(completion_ids, **kwargs):
    """Without it completions of a random model earn nothing, and nothing is trained."""
    return [float(sum(ids) % 13) for ids in completion_ids]


def run(engine: str, data: tuple[str, str], output: Path, trainer: str, shares: bool, flags: list[str]) -> dict:
    """What the script does; which prompts were computed for how many rows, by kind of pass, and the update."""
    kind, config = TRAINERS[trainer]
    parser = TrlParser((ScriptArguments, config, ModelConfig))
    ours = ["--model_name_or_path", data[0], "--output_dir", str(output), "--ddp_backend", "gloo", "--bf16", "false"]
    _, args, of_model = parser.parse_args_and_config([*ours, *flags, "--report_to", "none", "--max_steps", "2"])
    args.model_init_kwargs = {
        "revision": of_model.model_revision, "attn_implementation": of_model.attn_implementation,
        "dtype": getattr(torch, of_model.dtype),
    }  # fmt: skip
    torch.manual_seed(0)
    made = kind(
        model=of_model.model_name_or_path, args=args,
        reward_funcs=[think_format_reward, accuracy_reward, spread_reward], train_dataset=rows_of(data[1]),
        processing_class=AutoProcessor.from_pretrained(data[0]), quantization_config=get_quantization_config(of_model),
        peft_config=get_peft_config(of_model),
    )  # fmt: skip
    start, counted, count = whole_parameters(made), defaultdict(lambda: [0, 0]), SharedForward._count

    def counting(forward, kind, rows, computed, *reasons):
        counted[kind][0] += computed
        counted[kind][1] += rows
        return count(forward, kind, rows, computed, *reasons)

    around = share_prompts(made.model) if shares and kind is not DAPOTrainer else nullcontext()
    with patch.object(SharedForward, "_count", counting), around, reports_by_place() as places:
        made.train()
    if kind is DAPOTrainer:
        counted = {name: (report.prompts, report.rows) for name, report in places.items() if report.rows and shares}
    assert engines.found_engine(made) == engine
    end = whole_parameters(made)
    moved = {name: end[name] - start[name] for name in start}
    return {"counted": {name: prompts / rows for name, (prompts, rows) in counted.items()}, "moved": moved}


if __name__ == "__main__":
    engine, data, output = sys.argv[1], (sys.argv[2], sys.argv[3]), Path(sys.argv[4])
    engines.prepare(engine)
    for name, (trainer, shares, flags) in json.loads(sys.argv[5]).items():
        AcceleratorState._reset_state()  # DeepSpeed's configuration is of one run
        found = run(engine, data, output / f"run {name}", trainer, shares, flags)
        if os.environ["RANK"] == "0":
            torch.save(found, output / f"{name}.pt")
