"""Compare the weights after a few steps of `DAPOTrainer`, with everything on that changes nothing, with TRL's.

    python scripts/step_equality.py [--mixes 60] [--seed 0]

Every mix of options is drawn, then trained by stock TRL in one process and by this library in another, in float64 with
the default optimizer. The largest difference of two weights, relative to the largest update, is at most 1e-9.
"""

import argparse
import inspect
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TOLERANCE = 1e-9
CHOICES: dict[str, list[dict[str, Any]]] = {  # of each line a mix has one
    "loss": [
        {}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, {"loss_type": "bnpo"}, {"loss_type": "sapo"},
        {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "vespo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ],
    "batch": [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 4},
    ],
    "iterations": [{}, {}, {"num_iterations": 2}],
    "reference": [{}, {}, {"beta": 0.1}],
    "scale": [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}],
    "checkpointing": [{}, {"gradient_checkpointing": True}],
    "truncated": [{}, {}, {"mask_truncated_completions": True}],
    "entropy": [{}, {}, {}, {"top_entropy_quantile": 0.5}],
    "lora": [{"lora": False}, {"lora": True}],
    "images": [{"images": "one"}, {"images": "several"}, {"images": "none"}],
    "rewards": [{"rewards": "uneven"}, {"rewards": "half"}],
}  # fmt: skip
OURS: dict[str, list[dict[str, Any]]] = {  # on in ours alone; none of it may change the update
    "attention": [{}, {"compute_attention_metrics": True}, {"compute_attention_metrics": False}],
    "signals": [{}, {"signals": ["dependency"]}, {"signals": ["similarity", "entropies"]}, {"signals": ["jsd"]}],
    "tokens": [{}, {}, {"max_tokens_per_micro_batch": 150}],
    "share": [{}, {}, {"share_prompts": "off"}],
    "rows": [{}, {}, {"rows_per_pass": 3}, {"rows_per_pass": 16}, {"rows_per_pass": "off"}],
    "cache": [{}, {"vision_cache_megabytes": 0}],
}


def draw_mix(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of both trainers, and options of ours alone."""
    both, ours = ({k: v for of in table.values() for k, v in draw.choice(of).items()} for table in (CHOICES, OURS))
    if both["images"] == "none":
        ours.pop("compute_attention_metrics", None)
        ours.pop("signals", None)
    if both.get("loss_type") == "luspo" or both.get("top_entropy_quantile"):
        for name in ("max_tokens_per_micro_batch", "rows_per_pass"):  # parts change what these average over: refused
            ours.pop(name, None)
    return both, ours


def uneven_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return another value for nearly every completion."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def half_reward(completion_ids: list[list[int]], prompts: list[Any], **kwargs: Any) -> list[float]:
    """Return equal values for the completions of every other prompt."""
    contents = [prompt[0]["content"] for prompt in prompts]
    texts = [content if isinstance(content, str) else content[-1]["text"] for content in contents]
    even = [len(text) % 2 == 0 for text in texts]
    return [sum(ids) % 17 / 17 if uneven else 0.25 for ids, uneven in zip(completion_ids, even, strict=True)]


def compute_in_float64() -> None:
    """Let TRL's head and Qwen's norms and positions keep float64; they compute in float32 whatever they are given."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    module = ModuleType(chunked_logprob.__name__)
    module.__package__ = chunked_logprob.__package__
    exec(_in_float64(chunked_logprob), vars(module))
    utils._ChunkedLogProbFunction = module.ChunkedLogProbFunction

    for code in (modeling_qwen2_5_vl.apply_rotary_pos_emb_vision, modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding):
        exec(_in_float64(code).replace("torch.float)", "torch.float64)"), vars(modeling_qwen2_5_vl))

    def norm(self: Any, states: torch.Tensor) -> torch.Tensor:
        variance = states.square().mean(-1, keepdim=True)
        return self.weight * (states * torch.rsqrt(variance + self.variance_epsilon))

    modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm.forward = norm


def _in_float64(code: Any) -> str:
    return inspect.getsource(code).replace("torch.float32", "torch.float64").replace(".float()", ".double()")


def train(kind: str, mixes: int, seed: int, folder: Path) -> None:
    """Train every mix by `stock` or `ours`, and save the weights before and after."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from peft import LoraConfig
    from support import trainers
    from support.models import tiny_questions as tiny
    from support.steps import WORDS
    from trl import GRPOConfig, GRPOTrainer

    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.trainer import DAPOTrainer

    compute_in_float64()
    pictures = {
        "one": lambda number: [tiny.picture(number)],
        "several": lambda number: [tiny.picture(number), *([tiny.picture(number + 50, 84)] * (number % 3 == 0))],
    }
    draw = random.Random(seed)
    for number in range(mixes):
        both, ours = draw_mix(draw)
        model, processor = tiny.made_vision(folder / f"{kind}-model")
        images, lora, rewards = both.pop("images"), both.pop("lora"), both.pop("rewards")
        rows = tiny.questions(pictures.get(images, lambda number: []))
        rows = rows.remove_columns("images") if images == "none" else rows
        tokenizer = processor.tokenizer
        allowed = {tokenizer.eos_token_id, *tokenizer(WORDS)["input_ids"][:6]}
        settings = trainers.OPTIONS | {"max_completion_length": 8, "max_steps": 3, "temperature": 3.0, "seed": 7}
        settings |= {"epsilon_high": 0.28, "learning_rate": 1e-2, "output_dir": str(folder / kind)}
        settings |= {"generation_kwargs": {"suppress_tokens": sorted({*range(len(tokenizer))} - allowed)}}
        trainer_class, config_class = (DAPOTrainer, DAPOConfig) if kind == "ours" else (GRPOTrainer, GRPOConfig)
        torch.manual_seed(number)  # of the adapter
        trainer = trainer_class(
            model=model.double(),
            reward_funcs=half_reward if rewards == "half" else uneven_reward,
            args=config_class(**settings | both | (ours if kind == "ours" else {})),
            train_dataset=rows,
            processing_class=processor,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
        )
        trainer.model.double()
        if trainer.ref_model is not None:
            trainer.ref_model.double()
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        after = {name: value.detach() for name, value in trainer.model.named_parameters()}
        torch.save({"before": before, "after": after}, folder / f"{kind}-{number}.pt")
        print(f"{kind} {number}", file=sys.stderr, flush=True)


def compare(mixes: int, seed: int, folder: Path) -> bool:
    """Print the largest relative difference of every mix, and return whether all are within the tolerance."""
    draw, worst = random.Random(seed), 0.0
    for number in range(mixes):
        mix = draw_mix(draw)
        ours, stock = (torch.load(folder / f"{kind}-{number}.pt") for kind in ("ours", "stock"))
        update = max(float((stock["after"][name] - stock["before"][name]).abs().max()) for name in stock["after"])
        difference = max(float((ours["after"][name] - stock["after"][name]).abs().max()) for name in stock["after"])
        worst = max(worst, difference / update)
        print(f"{number:3}  {difference / update:.1e}  {mix}")
    print(f"largest of {mixes} mixes: {worst:.1e}, at most {TOLERANCE} is right")
    return worst <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("ours", "stock"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.kind:
        train(flags.kind, flags.mixes, flags.seed, flags.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--mixes", str(flags.mixes), "--seed", str(flags.seed), "--folder", name]
        runs = [subprocess.Popen([*command, "--kind", kind], stdout=subprocess.DEVNULL) for kind in ("stock", "ours")]
        statuses = [run.wait() for run in runs]
        if any(statuses) or not compare(flags.mixes, flags.seed, Path(name)):
            sys.exit(1)


if __name__ == "__main__":
    main()
