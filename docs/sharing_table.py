"""Write the table of docs/sharing.md: model families that share prompts and are measured.

python docs/sharing_table.py
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.models.compare import generated, gradients, largest_relative, scored, with_head  # noqa: E402
from support.models.eager_reference import assert_agrees, reference, run  # noqa: E402
from support.models.families import FAMILIES, OTHERS, Batch, Family, build, make_batch  # noqa: E402

from vgr_trl.errors import ConfigError  # noqa: E402
from vgr_trl.sharing import share_prompts  # noqa: E402
from vgr_trl.signals import RolloutScorer, visual_dependency  # noqa: E402

PAGE = ROOT / "docs" / "sharing.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
TITLES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "gemma4_published": "Gemma 4 as published",
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
    "qwen3": "Qwen3",
    "llama": "Llama",
    "llama4_text": "Llama 4",
    "gemma3_text": "Gemma 3",
    "gemma3n": "Gemma 3n",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "gemma2": "Gemma 2",
    "gpt_oss": "GPT-OSS",
    "phi3": "Phi-3",
    "phi3_longrope": "Phi-3 with longrope",
    "falcon_h1": "Falcon-H1",
    "jamba": "Jamba",
    "mamba": "Mamba",
}

COLUMNS = ("family", "shared", "attention", "dependency")
NUM_IMAGES = ((0, 0), (1, 1), (2, 3))  # of the two prompts of a batch


def make_table() -> str:
    """Return the table as Markdown: families that take images, a row for each exception, then text models."""
    families = {**FAMILIES, **OTHERS}
    if untitled := families.keys() - TITLES.keys():
        raise SystemExit(f"TITLES of {Path(__file__).name} lacks {', '.join(sorted(untitled))}: add their names.")
    cells = {TITLES[name]: cells_of(families[name]) for name in TITLES if families[name].picture}
    whole = ", ".join(title for title, of_family in cells.items() if {*of_family} == {"yes"})
    lines = [f"All three: {whole}.", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {title} | {' | '.join(row)} |" for title, row in cells.items() if {*row} != {"yes"}]
    text = {TITLES[name]: shared(families[name], NUM_IMAGES[0]) for name in TITLES if not families[name].picture}
    refused = "; ".join(f"{title} ({why.removeprefix('no: ')})" for title, why in text.items() if why != "yes")
    alike = ", ".join(title for title, why in text.items() if why == "yes")
    return "\n".join([*lines, "", f"Text models, shared: {alike}.", "", f"Not shared: {refused}."]) + "\n"


def cells_of(family: Family) -> list[str]:
    """Return the cells of a family: sharing, attention, dependency."""
    given = ("text", "one image", "several images")
    try:
        found = {name: shared(family, images) for name, images in zip(given, NUM_IMAGES, strict=True)}
    except AttributeError as error:  # Llama 4 in 5.24: its outputs lack image_outputs, which its own forward reads
        return [f"no: transformers {transformers.__version__} fails in its pass ({error})"] * 3
    alike = len({*found.values()}) == 1
    cell = found["text"] if alike else "; ".join(f"{name}: {each}" for name, each in found.items())
    return [cell, attention(family), dependency(family)]


def shared(family: Family, images: tuple[int, int]) -> str:
    """Return `yes`, or the places in which prompts are not shared, with the reason."""
    model, batch = with_head(build(family)), make_batch(family, images=images)
    why = {place.__name__: why_plain(place, model, batch) for place in (generation, scoring, training)}
    plain = [name for name, reason in why.items() if reason]
    reasons = "; ".join(dict.fromkeys(reason for reason in why.values() if reason))
    if len(plain) == len(why):
        return f"no: {reasons}"
    return f"not in {' and '.join(plain)}: {reasons}" if plain else "yes"


def why_plain(place: Callable[[Any, Batch], Any], model: Any, batch: Batch) -> str | None:
    """Return the reason for plain passes, or None if prompts are shared.

    Args:
        place: pass to compare, shared and plain.
        model: model of the family, with a head.
        batch: batch of the family.

    Raises:
        AssertionError: shared and plain passes disagree.
    """
    plain = place(model, batch)
    with share_prompts(model, batch.completion_length) as report:
        once = place(model, batch)
    difference = largest_relative(plain, once)
    if difference > 1e-4:
        raise AssertionError(f"{type(model).__name__}, {place.__name__}: passes differ by {difference:.1e}")
    return next(iter(report.plain), None)


def generation(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return sampled tokens, (N, T)."""
    return {"tokens": generated(model.eval(), batch, sample=True)}


def scoring(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return log-probabilities, (N, T)."""
    with torch.no_grad():
        return {"logps": scored(model.eval(), batch)[0]}


def training(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return gradients of all parameters."""
    return gradients(model.train(), batch)


def attention(family: Family) -> str:
    """Return `yes` if the mass on image and instruction equals eager attention's whole matrices, else a reason."""
    model, batch = build(family), make_batch(family, images=NUM_IMAGES[-1])
    try:
        probe = run(model, batch)
    except ConfigError as error:
        return f"no: {error}"
    assert_agrees(probe, reference(model, batch))
    return "yes"


def dependency(family: Family) -> str:
    """Return `yes` if other pixels change the log-probabilities of every completion, else a reason."""
    model, batch = build(family), make_batch(family, images=NUM_IMAGES[-1])
    if model.base_model is model:
        return "no: no base model below the head"
    length, generations = batch.completion_length, len(batch.groups) // batch.prompts
    inputs = dict(batch.inputs)
    columns = [inputs.pop(name) for name in ("input_ids", "attention_mask")]
    given = [part for column in columns for part in column.split([column.size(1) - length, length], dim=1)]
    ids, completion_ids, mask, completion_mask = given
    prompts = ids, mask, completion_ids, completion_mask
    whole, by_prompt = (RolloutScorer(model, batch_size=size) for size in (None, generations))
    clean = whole.score(*prompts, num_generations=generations, attention=False, **inputs)
    again = by_prompt.score(*prompts, num_generations=generations, attention=False, **inputs)
    assert torch.allclose(clean.logps, again.logps, atol=2e-5)
    inputs["pixel_values"] = -inputs["pixel_values"]
    changed = by_prompt.score(*prompts, num_generations=generations, attention=False, **inputs)
    depends = visual_dependency(clean.logps, changed.logps).where(clean.mask, 0).sum(1)
    return "yes" if bool((depends > 0).all()) else "no: other pixels change nothing"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: make_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
