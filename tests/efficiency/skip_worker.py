"""One of two processes over gloo: steps of `DAPOTrainer`, which shares prompts and leaves rows out, against TRL's."""

import gc
import sys
from pathlib import Path

import torch
import yaml
from support.steps import relative_difference, reports_by_place, uneven_reward
from support.trainers import logged, whole_parameters
from text_runs import START, train

KIND = sys.argv[1]  # ddp, or zero2 and zero3 in the environment of accelerate launch
TABLE = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text(encoding="utf-8"))


def run() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    device = {} if KIND == "ddp" else {"use_cpu": False, "ddp_backend": "gloo"}  # DeepSpeed chooses it itself
    for name, case in TABLE["two processes"].items():
        case |= {"reward": uneven_reward} if case.pop("uneven", False) else {}
        budget = {"max_tokens_per_micro_batch": 28} if name == "parts" else {}
        stock = train(True, **case, **device)
        with reports_by_place() as places:
            ours = train(False, **case, **device, **budget)
        assert stock.accelerator.num_processes == 2
        difference = relative_difference(START, whole_parameters(ours), whole_parameters(stock))
        assert difference < 3e-5, (name, difference)
        assert places["generation"].prompts_per_row == (1 / 3 if name == "straddling" else 1 / 4)
        assert places["training"].prompts_per_row < 1 / 2 or name not in ("a reference", "cispo")
        skipped = logged(ours, "skipped/rows")
        assert "reward" in case or min(skipped) > 0, skipped


if __name__ == "__main__":
    run()
