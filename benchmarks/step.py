"""Optimizer steps against TRL's `GRPOTrainer`: seconds, peak memory, operations; writes `results/step.md` and `.json`.

On a CPU with nothing else running, ten minutes; operations and memory do not mind company (`--only counts`):

    python benchmarks/step.py
    python benchmarks/step.py --quick --output /tmp/step

On a GPU: python benchmarks/step.py --device cuda --dtype bfloat16 --shape qwen2.5-vl-3b --checkpointing

Variants of a rollout take turns in one process. An update is all training passes of the rollout and the optimizer; a
step is generation by transformers, what is measured, and the update. Operations and peak memory are read in a process
of its own.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from machine import describe_machine, read_commit
from stage_passes import run_again_for_timing
from step_cases import cases
from step_results import page, table
from step_runs import Place, count_elsewhere, time_in_turns

RESULTS = Path(__file__).parent / "results" / "step"


def main() -> None:
    """Measure case after case; write what there is after each."""
    flags, place = _read_flags()
    path = flags.output.with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not flags.anew else {"cases": {}}
    found |= {"machine": describe_machine(place.threads), "place": asdict(place)}
    found["command"] = shlex.join(["python", "benchmarks/step.py", *sys.argv[1:]])
    found["commit"] = read_commit()
    for name in flags.cases:
        case = place.case(name)
        of_case = found["cases"].setdefault(name, {})
        if flags.only != "counts":
            of_case["seconds"] = time_in_turns(place, name, flags.repeats)
        if flags.only != "seconds":
            chosen = [variant for variant in case.variants if variant in (flags.variants or case.variants)]
            counts = {variant: count_elsewhere(place, name, variant) for variant in chosen}
            of_case["counts"] = of_case.get("counts", {}) | counts
        print(name, json.dumps(of_case), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(found, place))
    print("\n".join(table(found, place)))


def _read_flags() -> tuple[argparse.Namespace, Place]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*cases()], default=[*cases()])
    parser.add_argument("--only", choices=["seconds", "counts"], help="the others are kept as they were")
    parser.add_argument("--variants", nargs="+", help="whose operations and memory are read; the others are kept")
    parser.add_argument("--anew", action="store_true", help="keep nothing of earlier results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    for option in fields(Place):
        if option.type is bool:
            parser.add_argument(f"--{option.name}", action="store_true")
        else:
            kind = type(option.default) if option.default is not None else str
            parser.add_argument(f"--{option.name}", type=kind, default=option.default)
    flags = parser.parse_args()
    if flags.only != "counts":
        run_again_for_timing()
    return flags, Place(**{option.name: getattr(flags, option.name) for option in fields(Place)})


if __name__ == "__main__":
    main()
