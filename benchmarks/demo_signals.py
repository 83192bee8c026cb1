"""What rewards and credit by attention and dependency do on the demo; writes `results/demo_signals.md` and `.json`.

python benchmarks/demo_signals.py --seeds 0 1 2 3 4 --variants plain vgr token_weights filter shaping both

Every seed warm-starts one model, from which each variant trains on for the same number of steps. Held-out questions are
then answered by sampling: accuracy, late VGR, and the mean visual dependency of each word.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from demo_seeds import describe_machine

from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import Questions, draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.evaluation.writer import Writer
from vgr_trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward, vgr_reward
from vgr_trl.signals import RolloutScorer, blacken_patches, split_layers, vision_gain_ratio, visual_dependency
from vgr_trl.signals.modality import special_token_ids
from vgr_trl.trainer import DAPOTrainer

RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parent / "results"))
WEIGHTS = [2.5, 0.5, 1.0]  # accuracy, format, length, as in the experiments
TOKEN_CREDIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "vgr": {"reward_weights": [2.5, 0.2, 0.5, 1.0]},
    "unscaled": {"scale_rewards": "none"},
    "unscaled vgr": {"scale_rewards": "none", "reward_weights": [2.5, 1.0, 0.5, 1.0]},
    "token_weights": {"token_weights": True},
    "filter": {"enable_perception_filtering": True, "top_p_perception_tokens": 0.4},
    "shaping": {"enable_trajectory_reweighting": True, "trajectory_scaling_min": 0.9},
    "both": {
        "enable_perception_filtering": True,
        "top_p_perception_tokens": 0.4,
        "enable_trajectory_reweighting": True,
        "trajectory_scaling_min": 0.9,
    },
}


def main() -> None:
    """Run every seed and variant; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--variants", nargs="+", default=list(TOKEN_CREDIT), choices=TOKEN_CREDIT)
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--add_to", action="store_true", help="keep the seeds that the results hold already")
    flags = parser.parse_args()
    found = RESULTS / "demo_signals.json"
    runs: list[dict[str, Any]] = json.loads(found.read_text())["runs"] if flags.add_to and found.exists() else []
    for seed in flags.seeds:
        options = Options(seed=seed, steps=flags.steps)
        set_up_process(options)
        questions = draw(seed)
        model, processor = build_tiny_vlm(words_of(questions.train), seed=seed)
        warm_up(model, processor, questions, options)
        add(runs, {"seed": seed, "variant": "start", **look(model, processor, questions, options)})
        start = copy.deepcopy(model.state_dict())
        for variant in flags.variants:
            model.load_state_dict(start)
            torch.manual_seed(seed)
            began = time.monotonic()
            reinforce(model, processor, questions, options, variant)
            seconds = round(time.monotonic() - began, 1)
            seen = look(model, processor, questions, options)
            add(runs, {"seed": seed, "variant": variant, "seconds": seconds, **seen})
            print(json.dumps({name: runs[-1][name] for name in ("seed", "variant", "accuracy", "late_vgr", "seconds")}))
            write(runs, flags)


def add(runs: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Append `run`, in the place of an earlier one of the same seed and variant."""
    runs[:] = [other for other in runs if (other["seed"], other["variant"]) != (run["seed"], run["variant"])]
    runs.append(run)


def reinforce(model: Any, processor: Any, questions: Questions, options: Options, variant: str) -> None:
    """Train `model` in place."""
    changed = TOKEN_CREDIT[variant]
    length = get_soft_overlong_punishment(16, 5)
    rewards: list[Any] = [accuracy_reward, think_format_reward, length]
    if len(changed.get("reward_weights", WEIGHTS)) > len(WEIGHTS):
        rewards.insert(1, vgr_reward)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"log_completions": False, "disable_tqdm": True, "logging_steps": 50, "rollout_log_steps": 0}
        config = trainer_options(options, Path(folder), **quiet | {"reward_weights": WEIGHTS} | changed)
        DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=rewards,
            args=config,
            train_dataset=as_dataset(questions.train),
        ).train()


def look(model: Any, processor: Any, questions: Questions, options: Options, batch_size: int = 40) -> dict[str, Any]:
    """Accuracy and VGR of sampled answers to held-out questions, and the dependency of their words on the image."""
    model.eval()
    torch.manual_seed(1)
    writer = Writer(model, processor, max_completion_length=16)
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    right: list[float] = []
    vgr: list[float] = []
    words: dict[str, list[float]] = defaultdict(list)
    for first in range(0, len(questions.test), batch_size):
        rows = [row for row in questions.test[first : first + batch_size] for _ in range(options.num_samples)]
        inputs, perturbed = (writer.prompt(conversations(rows, perturbed)) for perturbed in (False, True))
        texts = [text for (text,) in writer.sample(inputs, 1, options.temperature)]
        right += [value or 0.0 for value in accuracy_reward(texts, [row["solution"] for row in rows])]
        ids, mask = tokenised(texts, processor)
        prompt_ids, prompt_mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        common: dict[str, Any] = {"num_generations": options.num_samples, **inputs}
        signals = scorer.score(prompt_ids, prompt_mask, ids, mask, **common)
        common |= {"attention": False, "pixel_values": perturbed["pixel_values"]}
        blackened = scorer.score(prompt_ids, prompt_mask, ids, mask, **common)
        mass: Any = signals.attention
        vgr += vision_gain_ratio(mass, split_layers(len(mass.vision))["late"]).tolist()
        dependency = visual_dependency(signals.logps, blackened.logps)
        for row, row_ids in enumerate(ids):
            for token, value, valid in zip(row_ids.tolist(), dependency[row].tolist(), mask[row].tolist(), strict=True):
                if valid:
                    words[processor.tokenizer.decode([token]).strip()].append(value)
    total = sum(map(len, words.values()))
    return {
        "accuracy": round(statistics.mean(right), 4),
        "late_vgr": round(statistics.mean(vgr), 4),
        "words": {
            word: [len(values), round(statistics.mean(values), 4)]
            for word, values in sorted(words.items(), key=lambda item: -statistics.mean(item[1]))
            if len(values) > total / 1000
        },
    }


def conversations(rows: list[dict[str, Any]], perturb: bool) -> list[Any]:
    """Prompts with their images, blackened in patches if asked for."""
    prompts = []
    for row in rows:
        seed = zlib.crc32(row["id"].encode())  # the same image for all samples of a question
        image = blacken_patches(row["image"], seed=seed) if perturb else row["image"]
        (message,) = build_prompt(row["problem"], None, system_prompt=None)
        content = [{"type": "image", "image": image}, {"type": "text", "text": message["content"]}]
        prompts.append([{"role": "user", "content": content}])
    return prompts


def tokenised(texts: list[str], processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Completions and their mask, (N, T), padded on the right, each with its end."""
    tokenizer = processor.tokenizer
    rows = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


def write(runs: list[dict[str, Any]], flags: Any) -> None:
    """Write the numbers and the tables."""
    machine = describe_machine(1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "demo_signals.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    (RESULTS / "demo_signals.md").write_text(report(runs, machine, flags))


def report(runs: list[dict[str, Any]], machine: dict[str, Any], flags: Any) -> str:
    """Tables of accuracy, VGR and dependency by word."""
    variants = [name for name in ("start", *TOKEN_CREDIT) if any(run["variant"] == name for run in runs)]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        "# Attention and dependency on the demo",
        "",
        f"Command: `python benchmarks/demo_signals.py --seeds {' '.join(map(str, seeds))} --steps {flags.steps}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        "320 held-out questions, 8 sampled answers each. `start` is the warm-started model, from which every variant "
        f"of a seed trains for {flags.steps} steps with the rewards accuracy 2.5, format 0.5, length 1. `vgr` adds the "
        "VGR reward with weight 0.2; with 1.0, and with 0.5 beside accuracy 1.0 and no length reward, seed 3 collapsed "
        "to repeated tokens: where all completions of a prompt are right, advantages divided by the group's deviation "
        "follow the VGR reward alone, however small its weight. `unscaled` does not divide (`scale_rewards` none); "
        "`unscaled vgr` adds the VGR reward with the experiments' weight, 1.0, to that. Late VGR: smaller is more "
        "attention to the image.",
        "",
    ]
    for name, title in (("accuracy", "Accuracy"), ("late_vgr", "Late VGR")):
        head = " | ".join(["variant", *(f"seed {seed}" for seed in seeds), "mean", "spread"])
        lines += [f"## {title}", "", f"| {head} |", "|---|" + "---:|" * (len(seeds) + 2)]
        for variant in variants:
            values = {run["seed"]: run[name] for run in runs if run["variant"] == variant}
            spread = statistics.stdev(values.values()) if len(values) > 1 else 0.0
            cells = [f"{values[seed]:.3f}" if seed in values else "" for seed in seeds]
            lines.append(f"| {variant} | {' | '.join(cells)} | {statistics.mean(values.values()):.3f} | {spread:.3f} |")
        lines.append("")
    lines += words_table(runs)
    return "\n".join(lines) + "\n"


def words_table(runs: list[dict[str, Any]]) -> list[str]:
    """Mean dependency of every word before and after plain training, over all seeds."""
    sums: dict[str, dict[str, list[float]]] = {"start": {}, "plain": {}}
    for run in runs:
        for word, (count, value) in run["words"].items() if run["variant"] in sums else ():
            so_far = sums[run["variant"]].setdefault(word, [0.0, 0.0])
            so_far[0] += count
            so_far[1] += count * value
    lines = [
        "## Which words the image matters for",
        "",
        "Mean visual dependency (KL to a patch-blackened image, clamped at 10) of each word in sampled answers, all "
        "seeds together, before and after plain reinforcement.",
        "",
        "| word | times before | dependency before | times after | dependency after |",
        "|---|---:|---:|---:|---:|",
    ]
    after = sums["plain"]
    order = sorted(
        {*sums["start"], *after}, key=lambda word: -(after.get(word, [1, 0])[1] / after.get(word, [1, 0])[0])
    )
    for word in order:
        cells = []
        for part in (sums["start"], after):
            count, total = part.get(word, [0.0, 0.0])
            cells += [f"{count:.0f}", f"{total / count:.4f}" if count else ""]
        lines.append(f"| `{word}` | " + " | ".join(cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
