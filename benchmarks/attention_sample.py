"""Curves of attention measured for all rows of a rollout, and for a sample of them: how far they are apart.

    python benchmarks/attention_sample.py --seeds 0 1 2 --steps 40        # some minutes per seed on one core

Each seed warm-starts the demo's model once and trains it twice, with `attention_rows` `all` and `auto`. A sample
changes no loss, so both runs train on the same completions.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vgr_trl.demo import Options
from vgr_trl.demo.demo import draw, set_up_process, to_dataset, trainer_options, warm_up, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.rewards.functions import accuracy_reward, think_format_reward
from vgr_trl.trainer import DAPOTrainer

CURVES = ("attention/late/vgr", "attention/early/vgr", "attention/all/aei_vision")


def train(options: Options, start: tuple[Any, Any], rows: str) -> list[dict[str, float]]:
    """Return the logs of a training from a copy of the start."""
    model, processor = copy.deepcopy(start[0]), start[1]
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_options(options, Path(folder), attention_rows=rows, disable_tqdm=True, rollout_log_steps=0)
        data = to_dataset(draw(options.seed).train)
        rewards: Any = [accuracy_reward, think_format_reward]
        trainer = DAPOTrainer(model, rewards, args, train_dataset=data, processing_class=processor)
        trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


def compare(every: list[dict[str, float]], sampled: list[dict[str, float]], curve: str) -> str:
    """Return one line: the means of a curve, their difference in standard errors, and the noise of a single step."""
    pairs = [(one[curve], other[curve]) for one, other in zip(every, sampled, strict=True) if curve in one]
    differences = [other - one for one, other in pairs]
    noise, level = stdev(differences), mean(one for one, _ in pairs)
    error = noise / len(pairs) ** 0.5
    return (
        f"{curve}: all {level:.4f}, sample {level + mean(differences):.4f} ({mean(differences) / error:+.1f} standard "
        f"errors), noise of a step {noise:.4f}"
    )


def main() -> None:
    """Print the comparison of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text_steps", type=int, default=Options.text_steps, help="of the warm start, at most")
    flags = parser.parse_args()
    for seed in flags.seeds:
        options = Options(seed=seed, steps=flags.steps, text_steps=flags.text_steps)
        set_up_process(options)
        questions = draw(seed)
        start = build_tiny_vlm(words_of(questions.train), seed=seed)
        warm_up(*start, questions, options)
        every, sampled = (train(options, start, rows) for rows in ("all", "auto"))
        losses = [max(abs(one["loss"] - other["loss"]) for one, other in zip(every, sampled, strict=True))]
        print(f"seed {seed}: largest difference of a loss {losses[0]:.2g}")
        print("\n".join(f"  {compare(every, sampled, curve)}" for curve in CURVES), flush=True)


if __name__ == "__main__":
    main()
