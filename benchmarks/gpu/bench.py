"""Updates, scoring, generation and whole steps of one model; adds lines to `results/gpu.jsonl`.

    PYTHONPATH=src:benchmarks python -m gpu.bench --shape qwen2.5-vl-7b --parts passes --minutes 9

What is compared takes turns in one process, on the same random weights in bfloat16. What is in the file already is
left alone unless `--again` is given, so that a run which ends before it is through is continued by the same command.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from sharing_models import MODEL_SHAPES, build_model, make_batch, make_processor
from sharing_passes import generate, score, switch_checkpointing_on
from stage_passes import LORA, Setting, make_runs
from trl.trainer.utils import add_fused_lm_head

from gpu.measure import device_rates, interleaved, kernels_of, release
from gpu.plan import COMPARED, SHAPES, TINY, Measurement, passes, steps
from gpu.results import FILE, Line, append, machine, read
from vgr_trl.sharing import share_prompts


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, one line at a time, until it is done or the time is up."""
    flags = parse_flags(arguments)
    started = time.monotonic()
    where = machine(flags.device)
    command = f"python -m gpu.bench --shape {flags.shape} --parts {' '.join(flags.parts)} --device {flags.device}"
    note = partial(_note, flags.output, where, command)
    if flags.again or "device" not in read(flags.output):
        note("device", partial(device_rates, flags.device, side=8192 if flags.device.startswith("cuda") else 512))
    wanted = [one for part in flags.parts for one in {"passes": passes, "steps": steps}[part](flags.shape)]
    for one in wanted:
        known = read(flags.output).get(one.name)
        if known is not None and "error" not in known.found and not flags.again:
            continue
        if time.monotonic() - started > 60 * flags.minutes:
            print(f"{one.name}: not run, {flags.minutes} minutes are over; the same command continues", flush=True)
            continue
        note(one.name, partial(measure, one, flags.device, flags.dtype, flags.attention, flags.repeats))


def _note(path: Path, where: dict[str, str], command: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Run, and write what was found, or how it failed."""
    try:
        found = run()
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
    finally:
        release()
    append(path, Line(name, where, command, found))
    print(name, found, flush=True)


def measure(one: Measurement, device: str, dtype: str, attention: str, repeats: int) -> dict[str, Any]:
    """Seconds and peak memory of all that is compared, or the kernels of an update and their shares."""
    runs = make(one, device, dtype, attention)
    if one.kind == "kernels":
        found: dict[str, Any] = {}
        for name, run in runs.items():
            run()
            found[name] = kernels_of(run, device)
        return found
    return interleaved(runs, device=device, repeats=repeats)


def make(one: Measurement, device: str, dtype: str, attention: str) -> Mapping[str, Callable[[], Any]]:
    """What is compared, all on one model."""
    if one.kind in ("update", "kernels"):
        return updates(one, device, dtype, attention)
    if one.kind == "generation":
        return generations(one, device, dtype, attention)
    setting = Setting(
        shape=one.shape,
        device=device,
        dtype=dtype,
        attention=attention,
        checkpointing=True,
        threads=torch.get_num_threads(),
        lora=one.adapters,
        optim=one.optimizer,
        one_model=True,
    )
    return make_runs(setting, one.size, COMPARED[one.kind], one.kind)


def updates(one: Measurement, device: str, dtype: str, attention: str, rank: int = 16) -> dict[str, Callable[[], Any]]:
    """Log-probabilities of a prompt's completions by TRL's head, and their gradients, with gradient checkpointing."""
    model, batch = _model_and_batch(one, device, dtype, attention)
    add_fused_lm_head(model)
    if one.adapters:
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA))
    switch_checkpointing_on(model)
    model.train()

    def run(shared: bool) -> None:
        with share_prompts(model, one.size.completion) if shared else nullcontext():
            score(model, batch, one.size.completion, gradients=True)
        model.zero_grad(set_to_none=True)

    return {"plain": partial(run, False), "shared": partial(run, True)}


def generations(one: Measurement, device: str, dtype: str, attention: str) -> dict[str, Callable[[], Any]]:
    """Exactly T new tokens for each of G equal prompts."""
    model, batch = _model_and_batch(one, device, dtype, attention)

    def run(shared: bool) -> None:
        with share_prompts(model) if shared else nullcontext():
            generate(model, batch, one.size.completion)

    return {"plain": partial(run, False), "shared": partial(run, True)}


def _model_and_batch(one: Measurement, device: str, dtype: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    shape = MODEL_SHAPES[one.shape]
    tokenizer = make_processor().tokenizer
    model = build_model(shape, tokenizer, device=device, dtype=dtype, attention=attention)
    return model, make_batch(one.size, tokenizer, prompts=1, device=device, dtype=dtype, patch=shape.patch)


def parse_flags(arguments: list[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=[*SHAPES, *TINY])
    parser.add_argument("--parts", nargs="+", choices=["passes", "steps"], default=["passes"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing new is begun afterwards")
    parser.add_argument("--again", action="store_true", help="measure anew what is in the file")
    parser.add_argument("--output", type=Path, default=FILE)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
