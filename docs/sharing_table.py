"""Makes the table of docs/sharing.md: which model families share prompts, in which place, and why the others do not.

python docs/sharing_table.py
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.models.compare import generated, gradients, largest_relative, scored, with_head  # noqa: E402
from support.models.families import FAMILIES, Batch, Family, build, make_batch  # noqa: E402
from support.models.other_families import OTHERS  # noqa: E402

from vgr_trl.sharing import share_prompts  # noqa: E402

PAGE = ROOT / "docs" / "sharing.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
TITLES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE, text",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "gemma4_published": "Gemma 4, as published",
    "llava": "LLaVA",
    "llava_next": "LLaVA-Next",
    "internvl": "InternVL",
    "idefics2": "Idefics2",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
    "glm4v": "GLM-4V",
    "mistral3": "Mistral 3",
    "paligemma": "PaliGemma",
    "ovis2": "Ovis2",
    "lfm2_vl": "LFM2-VL",
    "llama4": "Llama 4",
    "qwen3": "Qwen3, text",
    "llama": "Llama, text",
    "llama4_text": "Llama 4, text",
    "gemma3_text": "Gemma 3, text",
    "gemma3n": "Gemma 3n, text",
    "mistral": "Mistral, text",
    "qwen2": "Qwen2, text",
    "qwen3_moe": "Qwen3-MoE, text",
    "qwen3_next": "Qwen3-Next, text",
    "gemma2": "Gemma 2, text",
    "gpt_oss": "GPT-OSS, text",
    "phi3": "Phi-3, text",
    "phi3_longrope": "Phi-3 with longrope, text",
    "falcon_h1": "Falcon-H1, text",
    "jamba": "Jamba, text",
    "mamba": "Mamba, text",
}


def make_table() -> str:
    """The table as Markdown, one row per family."""
    families = {**FAMILIES, **OTHERS}
    lines = ["| family | generation | scoring | training |", "|---|---|---|---|"]
    for name, title in TITLES.items():
        lines.append(f"| {title} | " + " | ".join(cells_of(families[name])) + " |")
    return "\n".join(lines) + "\n"


def cells_of(family: Family) -> list[str]:
    """What is found in generation, scoring and training."""
    model, batch = with_head(build(family)), make_batch(family)
    return [cell(place, model, batch) for place in (generation, scoring, training)]


def cell(place: Callable[[Any, Batch], Any], model: Any, batch: Batch) -> str:
    """`yes`, or the reason for plain passes; an error where shared and plain passes disagree."""
    plain = place(model, batch)
    with share_prompts(model, batch.completion_length) as report:
        shared = place(model, batch)
    difference = largest_relative(plain, shared)
    if difference > 1e-4:
        raise AssertionError(f"{type(model).__name__}, {place.__name__}: passes differ by {difference:.1e}")
    return "no: " + next(iter(report.plain)) if report.plain else "yes"


def generation(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Sampled tokens, (N, T)."""
    return {"tokens": generated(model.eval(), batch, sample=True)}


def scoring(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Log-probabilities, (N, T)."""
    with torch.no_grad():
        return {"logps": scored(model.eval(), batch)[0]}


def training(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Gradients of all parameters."""
    return gradients(model.train(), batch)


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: make_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
