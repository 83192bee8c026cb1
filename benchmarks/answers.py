"""How often rewards agree with a person about outputs of models; writes `results/answers.md`.

python benchmarks/answers.py --vlmevalkit CLONE --easyr1 CLONE

The outputs are `tests/rewards/answers.jsonl`. Each reward gets the output and the reference as its own library passes
them: a letter if there are options, else a text, and the first of several accepted answers. Libraries whose clones are
not given are left out; EasyR1's rewards need `mathruler`.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from machine import processor_name

from vgr_trl.errors import RewardError
from vgr_trl.rewards import accuracy_reward, resolve_solution

ROOT = Path(__file__).parents[1]
LINES = [json.loads(line) for line in (ROOT / "tests/rewards/answers.jsonl").read_text("utf-8").splitlines()]
LETTERS = "ABCDEFGHIJ"
Judge = Callable[[str, str, dict[str, Any]], float | None]  # output, reference, line


def reference(line: dict[str, Any]) -> str:
    """Return what a library other than ours is given as the right answer."""
    solution = line["solution"][0] if isinstance(line["solution"], list) else line["solution"]
    with contextlib.suppress(RewardError):
        index = resolve_solution(solution, line["choices"]).index
        return str(solution) if index is None else LETTERS[index]
    return str(solution)


def ours(output: str, gold: str, line: dict[str, Any]) -> float | None:
    """The reward `accuracy`."""
    return accuracy_reward([output], [line["solution"]], [line["choices"]])[0]


def trl(output: str, gold: str, line: dict[str, Any]) -> float | None:
    """TRL's `accuracy_reward`, which gives None where it cannot read the reference."""
    from trl.rewards import accuracy_reward as plain

    found: float | None = plain([[{"content": output}]], [gold])[0]
    return found


def math_verify(output: str, gold: str, line: dict[str, Any]) -> float:
    """math-verify with its defaults."""
    from math_verify import parse, verify

    return float(verify(parse(gold), parse(output)))


def vlmevalkit(clone: Path) -> Judge:
    """VLMEvalKit's rule matching of options, before it asks a model."""
    stubs = {"vlmeval": ModuleType("vlmeval"), "vlmeval.smp": ModuleType("vlmeval.smp")}
    log = ModuleType("vlmeval.smp.log")
    log.get_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules.update(stubs | {"vlmeval.smp.log": log})
    matching = _module(clone / "vlmeval/utils/matching_util.py")

    def judge(output: str, gold: str, line: dict[str, Any]) -> float | None:
        if not (line["choices"] or (len(gold) == 1 and gold in LETTERS)):
            return None
        return float(
            matching.can_infer(output, dict(zip(LETTERS, line["choices"] or LETTERS[:4], strict=False))) == gold
        )

    return judge


def easyr1(clone: Path, name: str) -> Judge:
    """The accuracy of a reward file of EasyR1."""
    module = _module(clone / f"examples/reward_function/{name}.py")
    return lambda output, gold, line: float(module.accuracy_reward(output, gold))


def _module(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(heads: list[str], rows: list[list[Any]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def measure(judge: Judge) -> SimpleNamespace:
    """Return counts of verdicts that agree, that miss a right answer and that reward a wrong one, and seconds."""
    counts, start = Counter[str](), time.perf_counter()
    for line in LINES:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                given = judge(line["output"], reference(line), line)
            except Exception:
                given = 0.0
        if given is None:
            counts["left out"] += 1
            continue
        kind = "agrees" if bool(given) == line["right"] else "missed" if line["right"] else "rewarded"
        counts[kind] += 1
        counts[f"{line['family']} {kind}"] += 1
        counts[f"{line['kind']} {kind}"] += 1
        counts["tricks rewarded"] += kind == "rewarded" and line["trick"] != "wrong"
    return SimpleNamespace(counts=counts, seconds=time.perf_counter() - start)


def main() -> None:
    """Judge all outputs by all rewards and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vlmevalkit", type=Path)
    parser.add_argument("--easyr1", type=Path)
    flags = parser.parse_args()
    judges: dict[str, Judge] = {
        "`accuracy`, this library": ours,
        "TRL `accuracy_reward`": trl,
        "math-verify": math_verify,
    }
    if flags.vlmevalkit:
        judges["VLMEvalKit, options only"] = vlmevalkit(flags.vlmevalkit)
    if flags.easyr1:
        judges |= {f"EasyR1 `{name}`": easyr1(flags.easyr1, name) for name in ("r1v", "math")}
    logging.disable(logging.CRITICAL)
    found = {name: measure(judge) for name, judge in judges.items()}
    names = ("agrees", "missed", "rewarded", "tricks rewarded", "left out")
    rows = [[name, *(run.counts[each] for each in names), f"{run.seconds:.1f}"] for name, run in found.items()]
    mine = found["`accuracy`, this library"].counts

    def parts(part: str) -> list[list[Any]]:
        totals = Counter(line[part] for line in LINES)
        columns = ("agrees", "missed", "rewarded")
        return [[name, count, *(mine[f"{name} {each}"] for each in columns)] for name, count in sorted(totals.items())]

    heads = ["outputs", "agrees", "right, but 0", "wrong, but 1"]
    right = sum(line["right"] for line in LINES)
    text = "\n\n".join([
        "# Rewards against a person's verdict",
        f"{len(LINES)} outputs in the manner of 13 model families, {right} of them right, each with a verdict.",
        "Columns: verdicts that a reward shares; right outputs that get 0 (missed); wrong ones that get 1 (rewarded),\n"
        "and how many of these are refusals, negations, truncated, empty, hacks or name two; outputs without a\n"
        "reward; seconds. [How answers are judged](../../docs/answers.md).",
        table(["reward", *names, "seconds"], rows),
        "`accuracy` by family and by kind of answer:",
        table(["family", *heads], parts("family")),
        table(["kind", *heads], parts("kind")),
        f"`python benchmarks/answers.py --vlmevalkit CLONE --easyr1 CLONE`, one thread of {processor_name()}.",
    ])  # fmt: skip
    (ROOT / "benchmarks/results/answers.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
