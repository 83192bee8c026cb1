"""One page of all that was measured on a GPU: `results/gpu.md` from `results/gpu.jsonl`.

PYTHONPATH=src:benchmarks python -m gpu.report
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from sharing_models import MODEL_SHAPES
from sharing_operations import Update, executed_update, forward_of, logical_update, utilisation

from gpu.kernel_plan import STRATEGIES, Attention, attentions
from gpu.measure import peak_operations
from gpu.plan import COMPARED, SHAPES, Measurement, passes, steps
from gpu.results import FILE, Line, read

NOT_RUN = "not run"
TARGETS = (
    "gpu-tests",
    "gpu-bench-3b",
    "gpu-bench-7b",
    "gpu-kernels",
    "gpu-steps-3b",
    "gpu-steps-7b",
    "gpu-bench-4b",
    "gpu-bench-8b",
    "gpu-steps-4b",
    "gpu-steps-8b",
)
GOALS = (
    ("update, executed MFU", "qwen2.5-vl-3b update 1536,1280,1024,8", "executed", 0.30),
    ("update, executed MFU", "qwen2.5-vl-7b update 1536,1280,1024,8", "executed", 0.40),
    ("update, T 384, against TRL's", "qwen2.5-vl-7b update 1536,1280,384,8", "shared / plain", 0.30),
    ("update, T 1024, against TRL's", "qwen2.5-vl-7b update 1536,1280,1024,8", "shared / plain", 0.48),
    ("peak of an update with adapters", "qwen2.5-vl-7b update lora 1536,1280,384,8", "peak", 0.35),
    (
        "scoring with the probe, against without",
        "qwen2.5-vl-7b scoring 1536,1280,384,8",
        "shared + probe / shared",
        1.05,
    ),
    ("step with perception, against without", "qwen2.5-vl-7b step 1536,1280,384,8", "perception / ours", 1.15),
)


def page(lines: dict[str, Line]) -> str:
    """The whole page."""
    parts = [
        ["# On a GPU", "", INTRODUCTION],
        _machines(lines),
        _goals(lines),
        _measured(lines),
        _kernel_question(lines),
        _kernels(lines),
        _correctness(lines),
    ]
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip() + "\n"


INTRODUCTION = """\
Made by `make gpu-report` of the lines in `gpu.jsonl`, one per measurement; `make gpu` runs everything, each of these by
itself stays below 10 minutes and continues where it ended:
TARGETS.

Random weights in the published shapes (`benchmarks/sharing_models.py`), bfloat16, sdpa, gradient checkpointing. A size
is P,V,T,G: prompt tokens, vision tokens among them, completion tokens, completions of the prompt. Medians of at least
five runs that take turns in one process; peak memory is that above what stays allocated between the runs. *Executed*
MFU: operations that are run, over time, over the vendor's dense bfloat16 peak; *logical* MFU: operations that they
stand for (plain passes, nothing computed twice).""".replace("TARGETS", ", ".join(f"`make {one}`" for one in TARGETS))


KERNEL_QUESTION = """\
`make gpu-kernels`: attention of one layer, forward and backward. Our two stages; the same where the kernel knows the
mask instead of reading it; one packed row per group with FlexAttention's block masks (compiled once, `dynamic=True`);
keys and values gathered per path for variable-length flash attention. All else in a layer works on the same tokens, so
the share of an update that the best of the others would save is their difference, times the layers, over the time of
the shared update. Packing is built if that is more than 0.10 anywhere that matters."""


def _machines(lines: dict[str, Line]) -> list[str]:
    """Hardware and releases; what the device reached in a matrix product and a copy."""
    found = ["## Hardware and versions", ""]
    kinds = dict.fromkeys(", ".join(f"{key} {value}" for key, value in one.machine.items()) for one in lines.values())
    found += [f"- {kind}" for kind in kinds] or [f"- {NOT_RUN}"]
    rates = lines["device"].found if "device" in lines else {}
    if "operations" in rates:
        found += [
            "",
            f"Matrix product: {rates['operations'] / 1e12:,.0f} TFLOP/s; copy: {rates['bytes'] / 1e12:.2f} TB/s.",
        ]
    return found


def _goals(lines: dict[str, Line]) -> list[str]:
    found = ["## Goals", "", "| what | measurement | goal | found |", "|---|---|---:|---:|"]
    for what, name, column, goal in GOALS:
        value = _value(lines, name, column)
        sign = "≥" if column == "executed" else "≤"
        found.append(f"| {what} | {name} | {sign} {goal:.2f} | {NOT_RUN if value is None else f'**{value:.3f}**'} |")
    return found


def _value(lines: dict[str, Line], name: str, column: str) -> float | None:
    """Executed MFU of the shared pass, a ratio of times, or the ratio of peaks."""
    runs = _found(lines, name)
    if "error" in runs:
        return None
    if column == "peak":
        return runs["shared"]["peak"] / runs["plain"]["peak"] if "peak" in runs["shared"] else None
    if column == "executed":
        one = next(one for shape in SHAPES for one in [*passes(shape), *steps(shape)] if one.name == name)
        return _utilisations(one, "shared", lines)[0]
    some, other = column.split(" / ")
    return median(runs[some]["seconds"]) / median(runs[other]["seconds"])


def _found(lines: dict[str, Line], name: str) -> dict[str, Any]:
    return lines[name].found if name in lines else {"error": NOT_RUN}


def _measured(lines: dict[str, Line]) -> list[str]:
    columns = ["kind", "P,V,T,G", "run", "seconds", "ratio", "peak GB", "ratio", "executed MFU", "logical MFU"]
    found = ["## Times and memory"]
    for shape in SHAPES:
        found += ["", f"### {shape}", "", f"| {' | '.join(columns)} |", "|---|---|---|" + "---:|" * (len(columns) - 3)]
        for one in [*passes(shape), *steps(shape)]:
            if one.kind != "kernels":
                found += [f"| {' | '.join(cells)} |" for cells in _rows(one, lines)]
    return found


def _rows(one: Measurement, lines: dict[str, Line]) -> Iterable[list[str]]:
    first = COMPARED[one.kind][0]
    runs = _found(lines, one.name)
    kind = one.kind + (", LoRA" if one.adapters else f", {one.optimizer}" if one.kind == "step" else "")
    for name in COMPARED[one.kind]:
        cells = [kind, str(one.size), name]
        if "error" in runs:
            yield [*cells, runs["error"].replace("|", "/"), *[""] * 5]
            continue
        seconds, base = median(runs[name]["seconds"]), median(runs[first]["seconds"])
        cells += [f"{seconds:.3f}", "" if name == first else f"**{seconds / base:.3f}**"]
        peak, base = runs[name].get("peak"), runs[first].get("peak")
        cells += [f"{peak / 1e9:.1f}", "" if name == first else f"**{peak / base:.3f}**"] if peak and base else ["", ""]
        yield cells + [f"{share:.3f}" for share in _utilisations(one, name, lines)] + [""] * (2 * (one.kind == "step"))


def _utilisations(one: Measurement, name: str, lines: dict[str, Line]) -> list[float]:
    """Executed and logical, of passes; a step waits for much beside operations."""
    if one.kind == "step":
        return []
    shape, shared = MODEL_SHAPES[one.shape], name not in ("plain", "trl")
    if one.kind == "update":
        update = Update(one.adapters)
        operations = executed_update(shape, one.size, update, shared=shared), logical_update(shape, one.size, update)
    else:
        operations = (
            forward_of(shape, one.size, shared=shared).total,
            forward_of(shape, one.size, shared=False).total,
        )
    measured = lines["device"].found.get("operations", 1.0) if "device" in lines else 1.0
    peak = peak_operations(lines[one.name].machine["device"], measured)
    seconds = median(lines[one.name].found[name]["seconds"])
    return [utilisation(count, seconds, peak) for count in operations]


def _kernel_question(lines: dict[str, Line]) -> list[str]:
    found = [
        "## One row per group, or two stages",
        "",
        KERNEL_QUESTION,
        "",
        "| shape | P,V,T,G | " + " | ".join(f"{name}, ms" for name in STRATEGIES) + " | first packed call, s | saves |",
        "|---|---|" + "---:|" * (len(STRATEGIES) + 2),
    ]
    for one in attentions(SHAPES):
        runs = lines[one.name].found if one.name in lines else {}
        cells = [
            f"{1e3 * median(runs[name]['seconds']):.2f}" if name in runs and "seconds" in runs[name]
            else runs.get(name, {}).get("error", runs.get("error", NOT_RUN)).replace("|", "/")
            for name in STRATEGIES
        ]  # fmt: skip
        compiled = runs.get("packed", {}).get("first")
        cells.append(NOT_RUN if compiled is None else f"{compiled:.1f}")
        saved = _saved(one, runs, lines)
        cells.append(NOT_RUN if saved is None else f"**{saved:.3f}**")
        found.append(f"| {one.shape} | {one.size} | {' | '.join(cells)} |")
    return found


def _saved(one: Attention, runs: dict[str, Any], lines: dict[str, Line]) -> float | None:
    """The share of a shared update that the fastest other strategy would save; computing layers again not counted."""
    update = lines.get(Measurement("update", one.shape, one.size).name)
    times = {name: median(found["seconds"]) for name, found in runs.items() if found and "seconds" in found}
    if update is None or "shared" not in update.found or "two stages" not in times or len(times) < 2:
        return None
    whole = median(update.found["shared"]["seconds"])
    others = min(seconds for name, seconds in times.items() if name != "two stages")
    return one.model_shape.layers * (times["two stages"] - others) / whole


def _kernels(lines: dict[str, Line]) -> list[str]:
    found = ["## Kernels of an update", ""]
    for name, line in lines.items():
        if " kernels " in f" {name} " and "error" not in line.found and not name.startswith("tiny"):
            for run, shares in line.found.items():
                found += [f"{name}, {run}:", "", "| kernel | share |", "|---|---:|"]
                found += [f"| `{kernel.replace('|', '/')}` | {share:.3f} |" for kernel, share in shares.items()] + [""]
    return found if len(found) > 2 else [*found, NOT_RUN]


def _correctness(lines: dict[str, Line]) -> list[str]:
    found = ["## Correctness", "", "`make gpu-tests`; measured differences beside the outcome.", ""]
    tests = [line for name, line in lines.items() if name.startswith("tests/")]
    if not tests:
        return [*found, NOT_RUN]
    counts: dict[str, int] = {}
    for line in tests:
        counts[line.found["outcome"]] = counts.get(line.found["outcome"], 0) + 1
    found += [", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".", ""]
    found += ["| test | outcome | found |", "|---|---|---|"]
    for line in tests:
        measured = ", ".join(f"{key} {_short(value)}" for key, value in line.found.items() if key != "outcome")
        found.append(f"| `{line.name.removeprefix('tests/gpu/')}` | {line.found['outcome']} | {measured} |")
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
