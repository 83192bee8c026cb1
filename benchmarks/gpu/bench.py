"""Updates, scoring, whole steps and attention of one model; adds a line to `results/gpu.jsonl` after every repeat.

    PYTHONPATH=src:benchmarks python -m gpu.bench --shape qwen2.5-vl-7b --parts passes

What is compared takes turns in one process, on the same random weights. Repeats that are in the file already are not
run again, so a run that was cut is continued by the same command.
"""

import argparse
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from sharing_models import MODEL_SHAPES, build_model, make_batch, make_processor
from sharing_passes import score, switch_checkpointing_on
from stage_passes import LORA
from step_cases import log_normal
from torch.nn.functional import scaled_dot_product_attention
from trl.trainer.utils import add_fused_lm_head

from gpu import flash, strategies
from gpu.measure import Budget, Note, Run, cudnn, device_rates, error_of, release, take_turns
from gpu.plan import COMPARED, CUDNN, PARTS, SHAPES, SIGNALS, STRATEGIES, TINY, Measurement, plan
from gpu.results import FILE, Line, append, machine, read, runs_of
from gpu.steps import steps
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, build_modality_masks
from vgr_trl.vision import join_windows

Runs = dict[str, Run]


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing and fits into the time that is left."""
    flags, budget = parse_flags(arguments), Budget()
    command = f"python -m gpu.bench --shape {flags.shape} --parts {' '.join(flags.parts)} --device {flags.device}"

    def note(name: str, run: str, found: dict[str, Any]) -> None:
        append(flags.output, Line(name, run, machine(flags.device), command, found))
        print(name, run, found, flush=True)

    if not runs_of(read(flags.output), "device", "operations"):
        note("device", "", device_rates(flags.device, side=8192 if flags.device.startswith("cuda") else 512))
    for one in [one for part in flags.parts for one in plan(part, flags.shape)]:
        had = {run: len(found) for run, found in runs_of(read(flags.output), one.name).items()}
        missing = sum(max(one.repeats - had.get(run, 0), 0) for run in COMPARED[one.kind])
        if not missing:
            print(f"{one.name}: there already", flush=True)
        elif one.kind in ("step", *SIGNALS) or budget.fits(
            one.name, one.seconds * missing / one.repeats / len(COMPARED[one.kind])
        ):
            try:
                measure(one, flags, partial(note, one.name), budget, had)
            except Exception as error:
                traceback.print_exc()
                note(one.name, "", error_of(error))
            release()


def measure(one: Measurement, flags: argparse.Namespace, note: Note, budget: Budget, had: dict[str, int]) -> None:
    """Make what is compared, and run it."""
    place = (flags.device, flags.dtype, flags.attention)
    if one.kind in ("step", *SIGNALS):
        steps(one, place, note, budget, runs_of(read(flags.output), one.name))
        return
    take_turns(MAKERS[one.kind](one, *place), note, budget, device=flags.device, repeats=one.repeats, had=had)


def without_and_with(runs: Runs) -> Runs:
    """Each run without cuDNN's attention and with it."""

    def within(on: bool, run: Run) -> None:
        with cudnn(on):
            run()

    ways = (("", False), (CUDNN, True))
    return {f"{name}{behind}": partial(within, on, run) for name, run in runs.items() for behind, on in ways}


def updates(one: Measurement, device: str, dtype: str, attention: str, rank: int = 16) -> Runs:
    """Log-probabilities of a prompt's completions by TRL's head, and their gradients, with gradient checkpointing."""

    def make() -> tuple[Any, dict[str, torch.Tensor]]:
        model, batch = _model_and_batch(one, device, dtype, attention)
        add_fused_lm_head(model)
        if one.adapters:
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA))
        switch_checkpointing_on(model)
        return model.train(), batch

    def run(model: Any, shared: bool) -> None:
        with share_prompts(model, one.size.completion) if shared else nullcontext():
            score(model, batch, one.size.completion, gradients=True)
        model.zero_grad(set_to_none=True)

    (model, batch), (trained, _) = make(), make()
    join_windows(trained)
    ways = {"plain": (model, False), "shared": (model, True), "as trained": (trained, True)}
    runs = without_and_with({name: partial(run, *way) for name, way in ways.items()})
    return {name: runs[name] for name in COMPARED["update"]}


def scoring(one: Measurement, device: str, dtype: str, attention: str) -> Runs:
    """Log-probabilities and entropies as TRL computes them, with shared prompts, and with attention measured."""
    model, batch = _model_and_batch(one, device, dtype, attention)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, prompt = batch["input_ids"], one.size.prompt
    masks = build_modality_masks(
        ids[:, :prompt],
        batch["attention_mask"][:, :prompt],
        vision_token_ids=[model.config.image_token_id],
        special_token_ids=[],
    )
    labels = ids.clone()
    labels[:, :prompt] = -100

    def run(shared: bool, probed: bool) -> None:
        with torch.no_grad(), ExitStack() as stack:
            if shared:
                stack.enter_context(share_prompts(model, one.size.completion))
            probe = AttentionProbe(model, masks, rows=slice(prompt - 1, ids.size(1) - 1)) if probed else None
            if probe is not None:
                stack.enter_context(probe)
            model(**batch, labels=labels, fused_lm_head=True)
            _ = None if probe is None else probe.mass

    ways = {"trl": (False, False), "shared": (True, False), "shared + probe": (True, True)}
    return without_and_with({name: partial(run, *way) for name, way in ways.items()})


def generation(one: Measurement, device: str, dtype: str, attention: str) -> Runs:
    """Completions of one prompt, by transformers' growing cache and by its static one, which it compiles on a GPU."""
    model, batch = _model_and_batch(one, device, dtype, attention)
    shortened = ("input_ids", "attention_mask", "mm_token_type_ids")
    inputs = {name: value[:, : one.size.prompt] if name in shortened else value for name, value in batch.items()}
    length = {"max_new_tokens": one.size.completion, "min_new_tokens": one.size.completion, "do_sample": False}

    def run(shared: bool, cache: str | None) -> None:
        with share_prompts(model) if shared else nullcontext():
            model.generate(**inputs, **length, cache_implementation=cache)

    caches = {"": None, ", static": "static"}
    ways = {f"{name}{end}": (name == "shared", cache) for name in ("plain", "shared") for end, cache in caches.items()}
    return {name: partial(run, *way) for name, way in ways.items()}


def packing(one: Measurement, device: str, dtype: str, attention: str) -> Runs:
    """Updates with completions of log-normal lengths behind a shared prompt, by `sdpa` and by flash attention."""
    flash.install()
    model, batch = _model_and_batch(one, device, dtype, attention)
    add_fused_lm_head(model)
    switch_checkpointing_on(model)
    model.train()
    for row, length in enumerate(log_normal(one.size.generations, one.size.completion)):
        batch["attention_mask"][row, one.size.prompt + length :] = 0

    def run(kind: str) -> None:
        flash.attend_with(model, kind)
        with cudnn(False), share_prompts(model, one.size.completion) as report:
            score(model, batch, one.size.completion, gradients=True)
        model.zero_grad(set_to_none=True)
        if report.plain:
            raise RuntimeError(f"not shared: {', '.join(report.plain)}")

    return {"sdpa": partial(run, "sdpa"), "flash": partial(run, "flash_attention_2")}


def _model_and_batch(one: Measurement, device: str, dtype: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    shape = MODEL_SHAPES[one.shape]
    tokenizer = make_processor().tokenizer
    model = build_model(shape, tokenizer, device=device, dtype=dtype, attention=attention)
    return model, make_batch(one.size, tokenizer, prompts=1, device=device, dtype=dtype, patch=shape.patch)


def new_shapes(one: Measurement, device: str, dtype: str, attention: str) -> Runs:
    """Attention of one row forward and backward: of a length that was never seen before, or of one that was."""
    shape, lengths = MODEL_SHAPES[one.shape], count(one.size.prompt, 8)
    options: Any = {"device": device, "dtype": getattr(torch, dtype)}

    def run(masked: bool, seen: bool) -> None:
        length = one.size.prompt if seen else next(lengths)
        sizes = (1, shape.heads, length, shape.head_width)
        query, key, value = (torch.randn(sizes, requires_grad=True, **options) for _ in range(3))
        mask = torch.ones(length, length, device=device, dtype=torch.bool).tril() if masked else None
        scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked).sum().backward()

    ways = [
        (kind == "masked", bool(seen), kind + seen) for kind in ("masked", "causal") for seen in ("", ", seen before")
    ]
    return without_and_with({name: partial(run, masked, seen) for masked, seen, name in ways})


def attentions(one: Measurement, device: str, dtype: str, attention: str) -> Runs:
    """Attention of one layer, forward and backward, by every strategy; the first call compares it with float32."""
    size, shape = one.size, MODEL_SHAPES[one.shape]
    prompt = size.prompt - 1
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        length = prompt + size.generations * size.completion
        return torch.randn(heads, length, shape.head_width, device=device, generator=generator)

    inputs, weights = (draw(shape.heads), draw(shape.key_heads), draw(shape.key_heads)), draw(shape.heads)
    sizes = (prompt, size.completion, size.generations, device)
    exact = _outputs(strategies.make("reference", *sizes), inputs, weights)
    low: Any = [value.to(getattr(torch, dtype)) for value in (*inputs, weights)]
    compared: set[str] = set()
    make = cache(lambda name: strategies.make(name, *sizes))

    def run(name: str) -> None:
        gradients = device != "cpu" or name != "packed"  # FlexAttention has none on a CPU
        outputs = _outputs(make(name), low[:3], low[3], gradients=gradients)
        for found, right in zip(outputs, exact, strict=False) if name not in compared else ():
            error = float((found.float() - right).norm() / right.norm())
            if not error < 0.02:
                raise ValueError(f"{name} is wrong by {error:.3g}")
        compared.add(name)

    ways = without_and_with({name: partial(run, name) for name in STRATEGIES})
    return {name: ways[name] for name in COMPARED["attention"]}


def _outputs(strategy: Any, inputs: Any, weights: torch.Tensor, *, gradients: bool = True) -> list[torch.Tensor]:
    """Attention outputs, and gradients of a weighted sum of them in queries, keys and values."""
    leaves = [one.detach().requires_grad_(gradients) for one in inputs]
    output = strategy(*leaves)
    if not gradients:
        return [output]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


MAKERS: dict[str, Callable[..., Runs]] = {
    "new shape": new_shapes,
    "update": updates,
    "scoring": scoring,
    "generation": generation,
    "attention": attentions,
    "packing": packing,
}


def parse_flags(arguments: list[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPES[0], choices=[*SHAPES, *TINY])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--output", type=Path, default=FILE)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
