"""Operations of a step of every recipe, beside generation; writes `results/recipes.md`.

python benchmarks/recipes.py --size 768,512,128,8

One step of one prompt with G completions of equal length on random weights, as PyTorch counts products and attention,
forward and backward: passes over the completions, what a recipe measures, and the update. Prompts are shared. What
depends on the data is left out: further rounds of dynamic sampling, a replay buffer.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from sharing_measure import ATTENTION_ON_CPU
from sharing_models import Size, build_model, make_processor, make_question
from stage_passes import Setting, _options, uneven_reward
from torch.utils.flop_counter import FlopCounterMode

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.cli.recipes import passes
from vgr_trl.recipes import load_recipe, read_recipe, recipe_names
from vgr_trl.replacing import replaced
from vgr_trl.rewards import load_rewards

RESULT = Path(__file__).parent / "results" / "recipes.md"
OF_THE_RUN = (  # the same for all recipes here, or without a part in a step that is full
    "num_generations", "per_device_train_batch_size", "max_prompt_length", "max_completion_length", "soft_punish_cache",
    "learning_rate", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "early_reward_weights", "reward_funcs",
    "reward_weights", "dynamic_sampling", "dynamic_sampling_max_rounds", "online_filtering", "filter_key", "filter_low",
    "filter_high", "filter_min_reward", "replay_buffer_size", "replay_var_epsilon",
)  # fmt: skip
MEASURED = ("vgr", "mdi")  # rewards that read what is measured; all others are one that differs between completions


class Beside:
    """Operations outside of generation."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU)
        self.generated = 0

    @contextmanager
    def generation(self) -> Iterator[None]:
        """A block that is left out."""
        before = self.counter.get_total_flops()
        yield
        self.generated += self.counter.get_total_flops() - before

    @property
    def total(self) -> int:
        """Operations so far."""
        return self.counter.get_total_flops() - self.generated


def count(name: str, model: Any, processor: Any, setting: Setting, size: Size) -> int:
    """Return the operations of a step of a recipe.

    Args:
        name: of the recipe.
        model: whose weights change by one step.
        processor: of it.
        setting: what stays the same.
        size: of prompt, image, completions and group.
    """
    recipe = load_recipe(name)
    options = {key: value for key, value in recipe.items() if key not in OF_THE_RUN}
    plain = {"compute_attention_metrics": False, "rollout_log_steps": 0, "skip_dead_rows": "off"}
    if "noisy_generations" in options:
        options["noisy_generations"] = size.generations // 2
    known = {option.name for option in fields(DAPOConfig)}
    plugins = {key: options.pop(key) for key in list(options) if key not in known}
    features = Features(
        {"prompt": List({"role": Value("string"), "content": Value("string")}), "image": ImageFeature()}
    )
    measured = [reward for reward in recipe["reward_funcs"] if reward in MEASURED]
    trainer = DAPOTrainer(
        model,
        [uneven_reward, *load_rewards(measured)],
        DAPOConfig(**_options(setting, size, processor) | plain | options, plugin_options=plugins),
        Dataset.from_list([make_question(size, processor)], features=features),
        processing_class=processor,
    )
    found, generate = Beside(), trainer._generate

    def left_out(*args: Any, **more: Any) -> Any:
        with found.generation():
            return generate(*args, **more)

    with replaced(trainer, "_generate", left_out), found.counter:
        trainer.train()
    return found.total


def main() -> None:
    """Count and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="768,512,128,8", help="prompt, image tokens among it, completion, G")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=recipe_names(), help="recipes to count")
    flags = parser.parse_args()
    setting, size = Setting(hidden=flags.hidden, layers=flags.layers), Size.parse(flags.size)
    counts = {}
    for name in flags.only:
        torch.manual_seed(0)
        processor = make_processor(setting.model_shape.patch)
        model = build_model(setting.model_shape, processor.tokenizer, device="cpu", dtype="float32", attention="sdpa")
        with tempfile.TemporaryDirectory() as folder:  # which a reference is loaded from
            model.save_pretrained(folder)
            model.config._name_or_path = folder
            counts[name] = count(name, model, processor, setting, size)
        print(f"{name}: {counts[name]:,}", flush=True)
    RESULT.write_text(_table(counts, flags, setting), encoding="utf-8")


def _table(counts: dict[str, int], flags: argparse.Namespace, setting: Setting) -> str:
    base = counts["dapo"]
    rows = [
        f"| `{name}` | {passes(about)} | {found / 1e9:,.1f} | {found / base:.2f} |"
        for name, found in sorted(counts.items(), key=lambda item: item[1])
        if (about := read_recipe(name).about) is not None
    ]
    prompt, vision, completion, generations = flags.size.split(",")
    return "\n".join(
        [
            "# Operations of a step, by recipe",
            "",
            f"Command: `python benchmarks/recipes.py --size {flags.size}`",
            "",
            f"One prompt of {prompt} tokens, {vision} of them an image's, with {generations} completions of "
            f"{completion} tokens; random weights (hidden size {setting.hidden}, {setting.layers} layers, vocabulary "
            f"{setting.vocabulary:,}); products and attention as PyTorch counts them, generation left out, prompts "
            "shared, vision features computed anew in passes with gradients. Not time: nothing here was timed.",
            "",
            "| recipe | passes without + with gradients | 10⁹ operations | of `dapo`'s |",
            "|---|---:|---:|---:|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
