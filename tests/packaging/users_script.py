"""What a user writes: mypy is as strict with it as it can be, and has to find the two mistakes; it is never run."""

from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.registries import credit_rules, declares
from vgr_trl.reporting.notebook import show_completion
from vgr_trl.reporting.records import read_run
from vgr_trl.rewards import accuracy_reward, load_reward
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import RolloutSignals


@dataclass
class Options:
    strength: float = 1.0


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (1 + len(text.split())) for text in completions]


@credit_rules.register("looking")
@declares(needs=("attention",), options=Options)
def looking(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: Options
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert signals.attention is not None
    looks = signals.attention.vision.mean(0)
    return 1 + options.strength * (looks > looks.nanmean(1, keepdim=True)), {"looks": looks}


def train(rows: Any) -> list[str]:
    args = DAPOConfig(output_dir="run", learning_rate=1e-6, credit_rules=["looking"], plugin_options={"strength": 2.0})
    trainer = DAPOTrainer("model", [short, accuracy_reward, load_reward("format")], args, train_dataset=rows)
    with share_prompts(trainer.model) as report:
        trainer.train(resume_from_checkpoint=True)
    print(report.rows, report.plain.most_common(1), trainer.features["prompts"])
    last = list(read_run("run").records("train"))[-1]
    return [show_completion(completion, "run", token=0).html for completion in last.completions]


DAPOConfig(output_dir="run", token_weights="yes")  # type: ignore[arg-type]
declares(need=("attention",))  # type: ignore[call-arg]
