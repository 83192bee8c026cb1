"""Passes with shared prompts against plain ones: time, operations and memory; writes `results/sharing.json` and `.md`.

python benchmarks/sharing.py --shapes 768,512,128,8 32,0,256,8 --repeats 5

A shape is P,V,T,G: prompt tokens, vision tokens among them, completion tokens, completions per prompt. Plain and shared
passes alternate in one process, and medians are reported; peak memory is read in a process of its own for each. The
model is a Qwen2.5-VL with random weights and TRL's head. Nothing else should run on the machine, unless only operations
are counted (`--only operations`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from trl.trainer.utils import add_fused_lm_head

from vgr_trl.sharing import share_prompts

RESULTS = Path(__file__).parent / "results"
PLACES = ("scoring", "training", "training with checkpointing", "generation")
IMAGE, TEXT, VOCABULARY = 2, 8, 1024
# Without these the C library keeps freed memory, and the peak says nothing.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def main() -> None:
    """Measure every shape in every place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["768,512,128,8", "32,0,256,8"])
    parser.add_argument("--places", nargs="+", default=PLACES, choices=PLACES)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["time", "operations", "memory"])
    parser.add_argument("--peak-of", choices=["nothing", "plain", "shared"], help=argparse.SUPPRESS)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    if flags.peak_of:
        run = passes(flags, flags.shapes[0], flags.places[0])
        if flags.peak_of != "nothing":
            run(flags.peak_of == "shared")
        print(peak_memory())
        return
    rows = []
    for shape in flags.shapes:
        for place in flags.places:
            rows.append({"shape": shape, "place": place, **measure(flags, shape, place)})
            print(json.dumps(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    setting = {key: value for key, value in vars(flags).items() if key in ("prompts", "hidden", "layers", "repeats")}
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": flags.threads,
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }
    (RESULTS / "sharing.json").write_text(json.dumps({"machine": machine, **setting, "rows": rows}, indent=2) + "\n")
    (RESULTS / "sharing.md").write_text(report(rows, {**machine, **setting}))


def measure(flags: Any, shape: str, place: str) -> dict[str, Any]:
    """Plain and shared seconds, operations and peak bytes, and shared / plain of each."""
    found: dict[str, Any] = {}
    if flags.only in (None, "operations"):
        run = passes(flags, shape, place)
        found["operations"] = [operations(partial(run, shared)) for shared in (False, True)]
    if flags.only in (None, "time"):
        run = passes(flags, shape, place)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(flags.repeats + 1):
            for shared in (False, True):
                started = time.perf_counter()
                run(shared)
                seconds[shared].append(time.perf_counter() - started)
        found["seconds"] = [statistics.median(seconds[shared][1:]) for shared in (False, True)]  # the first is warm-up
    if flags.only in (None, "memory"):
        idle, *peaks = (peak_in_its_own_process(flags, shape, place, name) for name in ("nothing", "plain", "shared"))
        found["peak bytes"] = [peak - idle for peak in peaks]  # above libraries, model and batch
    ratios = {f"{name} ratio": round(shared / plain, 3) for name, (plain, shared) in found.items()}
    return {**found, **ratios}


def passes(flags: Any, shape: str, place: str) -> Callable[[bool], None]:
    """A function that makes one pass, shared or plain, on the same model and batch."""
    prompt, vision, completion, generations = map(int, shape.split(","))
    model = build(flags.hidden, flags.layers)
    batch = make_batch(prompt, vision, completion, generations, flags.prompts)
    if place == "training with checkpointing":
        model.activation_checkpointing_enable()
    model.train(place.startswith("training"))

    def run(shared: bool) -> None:
        with share_prompts(model, completion) if shared else nullcontext():
            if place == "generation":
                generate(model, batch, completion)
            else:
                score(model, batch, completion, gradients=place != "scoring")

    return run


def score(model: Any, batch: dict[str, torch.Tensor], completion: int, *, gradients: bool) -> None:
    """Log-probabilities of the completions, and their gradients if wanted."""
    labels = batch["input_ids"].clone()
    labels[:, :-completion] = -100
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        logps = model(**batch, labels=labels, fused_lm_head=True).log_probs
        if gradients:
            logps.sum().backward()


def generate(model: Any, batch: dict[str, torch.Tensor], completion: int) -> None:
    """As many new tokens as the completions have."""
    per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
    prompts = {name: value[:, :-completion] if name in per_token else value for name, value in batch.items()}
    model.generate(**prompts, do_sample=True, min_new_tokens=completion, max_new_tokens=completion)


def build(hidden: int, layers: int) -> Any:
    """A Qwen2.5-VL with random weights, scored as TRL does."""
    torch.manual_seed(0)
    head = hidden // 8
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head // 8, head // 4 - head // 16, head // 8 + head // 16],
        },
    }
    vision = {
        "depth": layers // 2,
        "hidden_size": hidden,
        "out_hidden_size": hidden,
        "num_heads": 8,
        "intermediate_size": 2 * hidden,
        "patch_size": 14,
        "fullatt_block_indexes": [layers // 2 - 1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=3, video_token_id=5
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def make_batch(prompt: int, vision: int, completion: int, generations: int, prompts: int) -> dict[str, torch.Tensor]:
    """Rows of prompt and completion, (prompts * generations, prompt + completion), with one image per row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TEXT, VOCABULARY, (prompts, prompt), generator=generator)
    ids[:, 4 : 4 + vision] = IMAGE
    ids = ids.repeat_interleave(generations, 0)
    ids = torch.cat([ids, torch.randint(TEXT, VOCABULARY, (len(ids), completion), generator=generator)], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if vision:
        height = 2 * max(side for side in range(1, vision + 1) if vision % side == 0 and side * side <= vision)
        pixels = torch.randn(prompts, 4 * vision, 3 * 2 * 14 * 14, generator=generator)
        batch["pixel_values"] = pixels.repeat_interleave(generations, 0).flatten(0, 1)
        batch["image_grid_thw"] = torch.tensor([[1, height, 4 * vision // height]] * len(ids))
        batch["mm_token_type_ids"] = (ids == IMAGE).long()
    return batch


def operations(run: Callable[[], None]) -> int:
    """Floating-point operations of matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def peak_in_its_own_process(flags: Any, shape: str, place: str, name: str) -> int:
    """Peak resident bytes of a process that makes one pass, or none."""
    command = [sys.executable, __file__, "--peak-of", name, "--shapes", shape, "--places", place]
    for option in ("prompts", "hidden", "layers", "threads"):
        command += [f"--{option}", str(getattr(flags, option))]
    environment = {**os.environ, **MEMORY_ENVIRONMENT}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])


def peak_memory() -> int:
    """VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def report(rows: list[dict[str, Any]], setting: dict[str, Any]) -> str:
    """A Markdown table of the ratios shared / plain."""
    names = [name for name in rows[0] if name.endswith("ratio")]
    lines = [
        "# Shared prompts against plain passes",
        "",
        ", ".join(f"{key} {value}" for key, value in setting.items()) + ". Shared divided by plain: smaller is better.",
        "",
        "| P, V, T, G | pass | " + " | ".join(name.removesuffix(" ratio") for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        values = " | ".join(f"{row[name]:.3f}" for name in names)
        lines.append(f"| {row['shape'].replace(',', ', ')} | {row['place']} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
