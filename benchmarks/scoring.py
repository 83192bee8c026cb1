"""What measuring attention costs; writes `results/scoring.md` and `results/scoring.json`.

python benchmarks/scoring.py --size 768,512,128,8 --repeats 7

A size is P,V,T,G: prompt tokens, vision tokens among them, completion tokens, completions per prompt. Compared, in
turns and in one process: scoring as TRL makes it, with shared prompts, with shared prompts and the attention probe, by
`RolloutScorer`, and with eager attention that returns its matrices; and whole optimizer steps. Peak memory is read in a
process of its own. Times need the machine for themselves; memory does not (`--only`).

On a GPU: python benchmarks/scoring.py --device cuda --shape qwen2.5-vl-3b --dtype bfloat16 --size 1536,1280,384,8
    --checkpointing --growth 1536,1280,512,8 3072,2560,1024,8 6144,5120,2048,8 12288,10240,4096,8
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine
from sharing_models import Size
from stage_passes import command, measure_bytes, measure_seconds, medians, read_flags

RESULTS = Path(__file__).parent / "results"
GOALS = {
    "shared + probe / shared, seconds": 1.10,
    "shared + probe / shared, bytes": 1.02,
    "shared + probe / trl, seconds": 0.22,
    "shared + probe / trl, bytes": 0.5,
    "scorer / trl, seconds": 0.22,
    "scorer / trl, bytes": 0.5,
    "shared + probe / eager, seconds": 0.15,
    "shared + probe / eager, bytes": 0.1,
    "vgr / ours, seconds": 1.10,
    "vgr / trl, seconds": 0.35,
}


def main() -> None:
    """Measure part after part; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="768,512,128,8")
    parser.add_argument("--long", default="1920,1280,128,8", help="size at which eager attention is compared")
    parser.add_argument("--growth", nargs="*", default=["768,512,64,8", "768,512,256,8", "768,512,512,8"])
    parser.add_argument("--parts", nargs="+", default=["a", "b", "c", "d", "growth"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", default="scoring")
    flags, setting = read_flags(parser)
    path = RESULTS / f"{flags.output}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"machine": describe_machine(setting.threads), "setting": asdict(setting)}
    found["page_faults"] = flags.page_faults
    for part, (size, names, kind) in parts(flags).items():
        if part not in flags.parts and part.split()[0] not in flags.parts:
            continue
        shown = Size.parse(size)
        repeats = max(3, flags.repeats // 2) if kind == "step" or part == "c" else flags.repeats
        if found.get(part, {}).get("size") != size:
            found[part] = {"size": size}
        if flags.only != "bytes":
            seconds = measure_seconds(setting, shown, names, kind, repeats)
            found[part] |= {"seconds": medians(seconds), "runs": seconds}
        if flags.only != "seconds":
            found[part]["bytes"] = measure_bytes(setting, shown, names, kind)
        print(part, json.dumps(found[part]), flush=True)
        write(path, found)


def parts(flags: Any) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Name of each part -> size, what is compared, kind."""
    compared: dict[str, tuple[str, tuple[str, ...], str]] = {
        "a": (flags.size, ("shared", "shared + probe"), "scoring"),
        "b": (flags.size, ("trl", "shared + probe"), "scoring"),
        "b scorer": (flags.size, ("trl", "scorer"), "scoring"),
        "c": (flags.long, ("eager", "shared + probe", "plain + probe"), "scoring"),
        "d": (flags.size, ("ours", "vgr"), "step"),
        "d trl": (flags.size, ("trl", "vgr"), "step"),
    }
    return compared | {f"growth {size}": (size, ("shared", "shared + probe"), "scoring") for size in flags.growth}


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the numbers and the table."""
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    setting = ", ".join(f"{name} {value}" for name, value in found["setting"].items())
    memory = "goes back to the system" if found["page_faults"] else "stays with the process"
    lines = [
        "# What measuring attention costs",
        "",
        f"Command: `{command('scoring', path, found)}`; sizes are P,V,T,G. Medians of interleaved runs; peak memory "
        "above that of libraries, model and batch, each in a process of its own.",
        "",
        f"{machine}. {setting}. Freed memory {memory}.",
        "",
        "| part | size | compared | seconds | ratio | goal | peak MB | ratio | goal |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for part, results in found.items():
        if part not in ("machine", "setting", "page_faults"):
            lines += rows(part, results)
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def rows(part: str, results: dict[str, Any]) -> list[str]:
    """Rows of the table: what is measured against each of the others."""
    *others, newest = [name for name in results.get("seconds") or results["bytes"] if name != "plain + probe"]
    if "eager" in others:
        others, newest = ["eager"], "shared + probe"
    lines = []
    for other in others:
        pair = f"{newest} / {other}"
        cells = [part.split()[0], results["size"], pair]
        for name, unit in (("seconds", 1), ("bytes", 1e6)):
            if (values := results.get(name)) is None:
                cells += ["", "", ""]
                continue
            goal = GOALS.get(f"{pair}, {name}") if not part.startswith("growth") else None
            shown = f"{values[newest] / unit:.3g} / {values[other] / unit:.3g}"
            cells += [shown, f"{values[newest] / values[other]:.3f}", "" if goal is None else f"≤ {goal}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
