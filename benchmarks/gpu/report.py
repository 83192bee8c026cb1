"""One page of all that was measured on a GPU: `results/gpu.md` from `results/gpu.jsonl`.

PYTHONPATH=src:benchmarks python -m gpu.report
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from evidence.__main__ import section as evidence_section
from sharing_models import MODEL_SHAPES
from sharing_operations import Update, executed_update, forward_of, logical_update, utilisation

from gpu.effect import CHOSEN
from gpu.measure import peak_operations
from gpu.plan import COMPARED, PARTS, SHAPES, STRATEGIES, Measurement, plan
from gpu.results import FILE, Line, read, runs_of

NOT_RUN = "not run"
LATER = ", later"  # behind the name of a run on another machine of the kind
OURS = ("as trained", f"as trained{LATER}", "shared")  # updates, the first that was measured
SEVEN = "qwen2.5-vl-7b"
GOALS = (
    ("executed MFU of an update", f"{SEVEN} update 1536,1280,384,8", "executed", "≥ 0.40"),
    ("executed MFU of an update", f"{SEVEN} update 1536,1280,1024,8", "executed", "≥ 0.40"),
    ("update against TRL's", f"{SEVEN} update 1536,1280,384,8", "shared / plain", "≤ 0.30"),
    ("update against TRL's", f"{SEVEN} update 1536,1280,1024,8", "shared / plain", "≤ 0.48"),
    ("its peak memory with adapters", f"{SEVEN} update lora 1536,1280,384,8", "peak", "≤ 0.35"),
    (
        "scoring with the probe, against without",
        f"{SEVEN} scoring 1536,1280,384,8",
        "shared + probe / shared",
        "≤ 1.05",
    ),
    ("share of an update that one row would save", f"{SEVEN} attention 1536,1280,384,8", "saved", "≤ 0.10"),
    ("share of an update that one row would save", f"{SEVEN} attention 1536,1280,1024,8", "saved", "≤ 0.10"),
)
Lines = Sequence[Line]


def page(lines: Lines) -> str:
    """The whole page."""
    parts = [["# On a GPU", "", INTRODUCTION], _machines(lines), _goals(lines), _measured(lines), _effect(lines)]
    parts.append(evidence_section(lines))
    return "\n".join(line for part in [*parts, _correctness(lines)] for line in [*part, ""]).rstrip() + "\n"


INTRODUCTION = """\
Made by `make gpu-report` of the lines in `gpu.jsonl`, one for every repeat. The machine needs torch and transformers;
`make gpu-wheels`, run where there is a network, puts the other packages into `.gpu/wheels`. The commands, the most
wanted first, with the minutes that each should take on an H200, computed with `benchmarks/cost.py` or guessed:

| command | minutes | what |
|---|---:|---|
| `make gpu-tests` | 2 | `tests/gpu`; attention of shapes that are new |
| `make gpu-passes` | 5 | updates and scoring, with cuDNN's attention and without |
| `make gpu-signals` | 3 | steps with LoRA: no signal, attention for metrics, every signal; static and growing caches |
| `make gpu-steps` | 13 | steps on two batches, prompts and images of different lengths; micro-batches of one first |
| `make gpu-generation` | 2 | generation by transformers: plain, with shared prompts, with a static cache |
| `make gpu-kernels` | 3 | attention of a layer by other strategies |
| `make gpu-packing` | 1 | completions of uneven lengths behind a shared prompt, `sdpa` and flash attention |
| `make gpu-effect` | 4 to 8 | a model of 100 M parameters from nothing: plain, VGR, VPPO, three seeds side by side |
| `make gpu-evidence` | 60, a guess | SmolLM2 behind a vision tower, five methods of the teacher study, three seeds |

One call of `make`, with one target or several, ends within `GPU_SECONDS` (540). What does not fit into what is left of
them is left out, and a line says so; the same call goes on with it. What the file has is not run again: after a change
to what is measured, give another `GPU_RESULTS`. `make gpu` is all of them. If files come back from one folder only,
results are written there, behind those that there are:

    cp benchmarks/results/gpu.jsonl $OUT/ || true
    make gpu-tests gpu-passes GPU_RESULTS=$OUT/gpu.jsonl

then `gpu-passes gpu-steps gpu-kernels`, then `gpu-kernels gpu-packing gpu-effect`: what is there is passed over.
`GPU_SHAPE=qwen3-vl-8b` measures another shape; `GPU_DEVICE=cpu GPU_SHAPE=tiny-qwen2.5-vl` tries
passes, steps and the `sdpa` half of packing without a GPU."""

MEASURED = """\
Measured before a pass became one call over one row ([counts since](launches.md)). Medians of repeats that take turns
in one process; *peak*: memory above what stays allocated between them. Random
weights in the published shapes, bfloat16, sdpa, gradient checkpointing. A size is P,V,T,G: prompt tokens, vision tokens
among them, completion tokens, completions of the prompt. *Executed* MFU: operations that are run, over time, over the
vendor's dense bfloat16 peak; *logical* MFU: operations that they stand for (plain passes, nothing computed twice).
*cuDNN*: sdpa takes its kernels first, as torch does from 2.11 on; the other runs have them switched off.

- new shape: attention of one row, forward and backward; of a length that is new in every repeat, or seen before.
- *later*: on another machine of the kind; the seconds stand beside no one else's.
- update: forward and backward of one group with TRL's head, without a trainer. TRL leaves cuDNN on, we switch it off:
  *shared* takes 0.206 of *plain, cuDNN*, with LoRA 0.222. The two repeats of *plain, cuDNN*: 7.30 and 8.45 s, LoRA 9.87
  and 9.74; of *plain*: 7.18 and 8.14, LoRA 11.57 and 9.41; of *shared*: 1.53 and 1.72, LoRA 2.25 and 2.10.
  *Shared* is a pass with shared prompts alone; *as trained* is one as our trainer makes it: the windows of the
  vision tower run in one call, and flash attention reads no mask. Without the latter it took 0.83 s, on a third
  machine. There, passes without gradients took 0.257 s and with the windows in one call 0.212; on the later one 0.245
  and 0.193; *shared* scoring below, which computes entropies, 0.285.
- signals: two groups with LoRA a step, mean over two steps after one that warms up, which compiles where the cache is
  static: 46 s in the first variant, in the others what that one has left. *metrics* measures one of the two groups.
  Their updates are equal and differ by 13 %, so smaller differences of steps say nothing. By stage, *none* spends 3.19
  s on generation and 1.39 s on the rest, 1.16 s of it after the rollout (*update s*). *metrics* adds a scoring pass of
  0.21 s, *signals* one of 0.44 s and passes over perturbed images of 0.58 s.
- step: mean over two batches of one prompt each, both different, after one that warms up. Sides of images, words of
  prompts and lengths of completions are log-normal; generation computes T tokens. By SGD. TRL's trainer
  as it comes, with cuDNN; ours as it comes, without. Memory: the most that was allocated and reserved in any step.
  *Micro-batch 1*: one completion a micro-batch; else the whole group. The update is what is not the rollout. *Static*:
  compiled in the first batch and, for a longer prompt, again in the second (9 to 52 s).
  **No other page quotes these steps**: each row ran once, for two steps, with shapes that do not repeat. Micro-batches
  change the update alone, yet TRL's rollout of the same batches took 17.1 s beside micro-batches of one and 7.0 s
  beside whole groups, with LoRA 12.9 and 21.6; ours 7.2, 7.9, 16.1 and 17.5. TRL's updates of whole groups took 8.17
  and 2.31 s after 1.16 s in the step that warms up. A median of updates whose shapes repeat is not measured.
- generation: T tokens of every completion by transformers, a group at once, with its growing cache or a static one,
  which it compiles in a first call that is not counted. The first repeat of *plain, static* compiled again: 20.8 s,
  then 2.9, of which *shared, static* takes 0.58.
- attention: of one layer, forward and backward. *Two stages*: prompts, then completions, in two calls; the same where
  the kernel knows the mask instead of reading it; one packed row per group with FlexAttention's block masks; keys and
  values gathered per path for variable-length flash attention. All else in a layer works on the same tokens, so one
  row would save the difference, times the layers.
- packing: an update with completions of log-normal lengths; flash attention is the copy that torch has. *padded* and
  *packed*: with `sdpa` and with flash attention, before passes became one call over one row."""


def _machines(lines: Lines) -> list[str]:
    """Hardware and releases; what the device reached in a matrix product and a copy."""
    found = ["## Hardware and versions", ""]
    kinds = dict.fromkeys(", ".join(f"{key} {value}" for key, value in one.machine.items()) for one in lines)
    found += [f"- {kind}" for kind in kinds] or [f"- {NOT_RUN}"]
    for rates in runs_of(lines, "device", "operations").get("", [])[-1:]:
        product, copy = rates["operations"] / 1e12, rates["bytes"] / 1e12
        found += ["", f"Matrix product: {product:,.0f} TFLOP/s; copy: {copy:.2f} TB/s."]
    return found


def _goals(lines: Lines) -> list[str]:
    found = ["## Goals", "", "| what | measurement | goal | found |", "|---|---|---:|---:|"]
    for what, name, column, goal in GOALS:
        value = _value(lines, name, column)
        found.append(f"| {what} | {name} | {goal} | {NOT_RUN if value is None else f'**{value:.3f}**'} |")
    return found


def _value(lines: Lines, name: str, column: str) -> float | None:
    """Executed MFU of our pass, a ratio of times or of peaks, or what other strategies of attention save."""
    if column == "executed":
        one = next(one for one in plan("passes", SHAPES[0]) if one.name == name)
        return next((found[0] for run in OURS if (found := _utilisations(one, run, lines))), None)
    if column == "saved":
        update = _median(lines, name.replace("attention", "update"), "shared")
        ours, *others = (_median(lines, name, strategy) for strategy in STRATEGIES)
        fastest = min((other for other in others if other), default=None)
        return MODEL_SHAPES[SHAPES[0]].layers * (ours - fastest) / update if update and ours and fastest else None
    some, other = ("shared", "plain") if column == "peak" else column.split(" / ")
    key = "peak" if column == "peak" else "seconds"
    above, below = _median(lines, name, some, key), _median(lines, name, other, key)
    return above / below if above and below else None


def _median(lines: Lines, name: str, run: str, key: str = "seconds") -> float | None:
    """Over the repeats of a run, and the mean over steps; the most of all memory. None if there is none."""
    found = [one[key] for one in runs_of(lines, name).get(run, ()) if key in one]
    middle = max if key in ("peak", "reserved") else mean if " step " in name else median
    return middle(found) if found else None


def _measured(lines: Lines) -> list[str]:
    columns = [
        "repeats",
        "seconds",
        "ratio",
        "update s",
        "ratio",
        "peak GB",
        "ratio",
        "reserved GB",
        "executed MFU",
        "logical MFU",
    ]
    found = ["## Times and memory", "", MEASURED]
    for shape in SHAPES:
        if shape == SHAPES[0] or any(line.name.startswith(shape) for line in lines):
            head = f"| kind | P,V,T,G | run | {' | '.join(columns)} |"
            found += ["", f"### {shape}", "", head, "|---|---|---|" + "---:|" * len(columns)]
            for one in [one for part in PARTS for one in plan(part, shape)]:
                found += [f"| {' | '.join(cells)} |" for cells in _rows(one, lines)]
    return found


def _rows(one: Measurement, lines: Lines) -> Iterable[list[str]]:
    errors, first = runs_of(lines, one.name, "error"), COMPARED[one.kind][0]
    others = sorted({line.run for line in lines if line.name == one.name and line.run} - {*COMPARED[one.kind]})
    for name in (*COMPARED[one.kind], *others):
        rows = "" if one.rows is None else f", micro-batch {one.rows}"
        cells = [one.kind + (", LoRA" if one.adapters else "") + rows, str(one.size), name]
        repeats = len(runs_of(lines, one.name).get(name, ()))
        if not repeats:
            why = errors.get(name, errors.get("", [{"error": NOT_RUN}]))[-1]["error"]
            yield [*cells, why.replace("|", "/"), *[""] * 9]
            continue
        cells.append(str(repeats))
        amounts = (("seconds", 1, ".4g"), ("update", 1, ".4g"), ("peak", 1e9, ".1f"), ("reserved", 1e9, ".1f"))
        for key, unit, form in amounts:
            value, base = (_median(lines, one.name, run, key) for run in (name, first))
            cells.append(f"{value / unit:{form}}" if value else "")
            if key != "reserved":
                alone = name == first or name.endswith(LATER)
                cells.append(f"**{value / base:.3f}**" if value and base and not alone else "")
        yield cells + ([f"{share:.3f}" for share in _utilisations(one, name, lines)] or ["", ""])


def _utilisations(one: Measurement, name: str, lines: Lines) -> list[float]:
    """Executed and logical, of updates and scoring."""
    seconds = _median(lines, one.name, name)
    if one.kind not in ("update", "scoring") or seconds is None:
        return []
    shape, shared, update = MODEL_SHAPES[one.shape], not name.startswith(("plain", "trl")), Update(one.adapters)
    executed, logical = executed_update(shape, one.size, update, shared=shared), logical_update(shape, one.size, update)
    if one.kind == "scoring":
        executed, logical = (forward_of(shape, one.size, shared=each).total for each in (shared, False))
    rates = runs_of(lines, "device", "operations").get("", [{"operations": 1.0}])
    device = next(line.machine["device"] for line in lines if line.name == one.name)
    peak = peak_operations(device, rates[-1]["operations"])
    return [utilisation(count, seconds, peak) for count in (executed, logical)]


EFFECT = """\
`make gpu-effect`: a Qwen2.5-VL of 101 M parameters (12 layers of 768, a tower of 3), from random weights, on the demo's
drawn questions and, where `.gpu/easy_vqa` has `train.parquet` and `test.parquet`, on those of easy-VQA for a colour or
a shape. One warm start per seed, from which every method goes on. Accuracy of sampled answers to held-out questions in
the course of it; of a run that was cut, the last that was measured. float32 with TF32."""


def _effect(lines: Lines) -> list[str]:
    found = [
        "## Effect",
        "",
        EFFECT,
        "",
        "| questions | method | seed | steps | start | last | change |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    names = sorted({line.name for line in lines if line.name.startswith("effect, ")})
    for name, method in product(names, ("", *CHOSEN)):
        course = runs_of(lines, name, "step").get(method, [])
        cells = [name.split(", ")[1], method or "warm start", name.split()[-1]]
        for first in [point for point in course if point["step"] == 0][-1:]:
            start, last = first["accuracy"], course[-1]["accuracy"]
            more = [str(course[-1]["step"]), f"{start:.3f}", f"{last:.3f}", f"**{last - start:+.3f}**"]
            found.append(f"| {' | '.join([*cells, *more])} |")
        for error in [] if course else runs_of(lines, name, "error").get(method, [])[-1:]:
            found.append(f"| {' | '.join([*cells, error['error'].replace('|', '/'), '', '', ''])} |")
    return found if names else [*found[:3], "", NOT_RUN]


def _correctness(lines: Lines) -> list[str]:
    found = ["## Correctness", "", "`make gpu-tests`; measured differences beside the outcome.", ""]
    tests = {line.name: line.found for line in lines if line.name.startswith("tests/")}
    if not tests:
        return [*found, NOT_RUN]
    counts = Counter(one["outcome"] for one in tests.values())
    found += [", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".", ""]
    found += ["| test | outcome | found |", "|---|---|---|"]
    for name, one in tests.items():
        measured = ", ".join(f"{key} {_short(value)}" for key, value in one.items() if key != "outcome")
        found.append(f"| `{name.removeprefix('tests/gpu/')}` | {one['outcome']} | {measured} |")
    return found


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:200]


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, default=FILE)
    parser.add_argument("--output", type=Path, default=FILE.with_suffix(".md"))
    flags = parser.parse_args(arguments)
    flags.output.write_text(page(read(flags.lines)))


if __name__ == "__main__":
    main()
