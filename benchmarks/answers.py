"""How often rewards agree with a person about outputs of models; writes `results/answers.md`.

python benchmarks/answers.py --vlmevalkit CLONE --easyr1 CLONE
python benchmarks/answers.py --mathvista CLONE --math_v CLONE --mmmu CLONE --labelled FILE.jsonl --before CHECKOUT

The outputs are `tests/rewards/answers.jsonl`. Each reward gets the output and the reference as its own library passes
them: a letter if there are options, else a text, and the first of several accepted answers. Libraries whose clones are
not given are left out; EasyR1's rewards need `mathruler`.

The second command writes `results/answers_published.md`: right and wrong outputs that earn, of the golden file, a
file of labelled outputs (text, solution, choices, label) and of outputs that benchmarks publish with their own verdict.
CLONE is a git clone of lupantech/MathVista, mathllm/MATH-V and MMMU-Benchmark/MMMU; CHECKOUT is an older state of this
repository. None of these outputs is part of this repository.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
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


def published(mathvista: Path, math_v: Path, mmmu: Path) -> dict[str, list[tuple[str, Any, Any, bool]]]:
    """Return (output, solution, choices, verdict) of each benchmark.

    Outputs of MathVista that are programs and those of MATH-V without reasoning are left out.
    """

    def read(clone: Path, pattern: str) -> list[tuple[str, str]]:
        git = ["git", "-C", str(clone), "-c", "core.quotepath=off"]
        names = subprocess.run([*git, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True).stdout
        files = [name for name in names.splitlines() if re.fullmatch(pattern, name)]
        shown = [
            subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, text=True).stdout for name in files
        ]
        return [(name, text) for name, text in zip(files, shown, strict=True) if text]  # large files may be absent

    [(_, questions)] = read(math_v, r"data/test\.jsonl")
    asked = {row["id"]: row for row in map(json.loads, questions.splitlines())}
    rows: dict[str, list[tuple[str, Any, Any, bool]]] = {"MathVista": [], "MATH-V": [], "MMMU-Pro": []}
    for _, text in read(math_v, r"outputs/.*CoT.*\.jsonl"):
        for row in map(json.loads, text.splitlines()):
            gold = asked[row["id"]]
            rows["MATH-V"].append((row["response"], gold["answer"], gold["options"] or None, bool(row["correct"])))
    for _, text in read(mathvista, r"results/(?!random|leader)\w+/output_(?!.*code)\w+\.json"):
        for row in json.loads(text).values():
            if "true_false" in row and row.get("response"):
                rows["MathVista"].append((row["response"], row["answer"], row["choices"], bool(row["true_false"])))
    for _, text in read(mmmu, r"mmmu-pro/output/.*\.jsonl"):
        for row in map(json.loads, text.splitlines()):
            with contextlib.suppress(ValueError, SyntaxError, KeyError):
                options = [str(option) for option in ast.literal_eval(row["options"])]
                rows["MMMU-Pro"].append((row["response"], row["answer"], options, bool(row["if_right"])))
    return rows


def count_rewarded(flags: argparse.Namespace) -> dict[str, list[int]]:
    """Return for each set of outputs: right rewarded, right, wrong rewarded, wrong."""
    rows = {name: found[:: flags.every] for name, found in published(flags.mathvista, flags.math_v, flags.mmmu).items()}
    rows["golden"] = [(line["output"], line["solution"], line["choices"], line["right"]) for line in LINES]
    if flags.labelled:
        lines = map(json.loads, flags.labelled.read_text("utf-8").splitlines())
        labelled = [(line["text"], line["solution"], line.get("choices"), line["label"] == "right") for line in lines]
        rows["labelled"] = labelled
    counts = {name: Counter[tuple[bool, bool]]() for name in rows}
    for name, found in rows.items():
        for output, solution, choices, is_right in found:
            counts[name][is_right, bool(accuracy_reward([output], [solution], [choices])[0])] += 1
    return {
        name: [count[True, True], count[True, True] + count[True, False], count[False, True], sum(count.values())]
        for name, count in counts.items()
    }


def compare_states(flags: argparse.Namespace) -> None:
    """Write the page of published outputs: this state and an older one."""
    found = {"this state": count_rewarded(flags)}
    if flags.before:
        words = [sys.executable, __file__, *sys.argv[1:], "--counts"]
        environment = {**os.environ, "PYTHONPATH": str(flags.before / "src")}
        shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        found["before"] = json.loads(shown.splitlines()[-1])
    names = list(found["this state"])
    cells = {
        state: [f"{right} of {rights}; {wrong} of {total - rights}" for right, rights, wrong, total in counts.values()]
        for state, counts in found.items()
    }
    text = "\n\n".join([
        "# Right and wrong outputs that earn",
        "Each cell: right outputs rewarded, of all right ones; wrong outputs rewarded, of all wrong ones.",
        table(["state", *names], [[state, *cells[state]] for state in found]),
        "Outputs and verdicts of MathVista (lupantech/MathVista, `results/*/output_*.json` without programs), MATH-V\n"
        "(mathllm/MATH-V, `outputs`, those with reasoning) and MMMU-Pro (MMMU-Benchmark/MMMU, `mmmu-pro/output`), "
        f"1 of\n{flags.every} of each. Their verdicts have faults of their own. Golden: `tests/rewards/answers.jsonl`.",
        "`" + " ".join(["python benchmarks/answers.py", "--mathvista CLONE --math_v CLONE --mmmu CLONE",
                        "--labelled FILE.jsonl --before CHECKOUT", f"--every {flags.every}"]) + "`",
    ])  # fmt: skip
    (ROOT / "benchmarks/results/answers_published.md").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Judge all outputs by all rewards and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vlmevalkit", type=Path)
    parser.add_argument("--easyr1", type=Path)
    for name in ("mathvista", "math_v", "mmmu", "labelled", "before"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--every", type=int, default=1, help="judge one of so many published outputs")
    parser.add_argument("--counts", action="store_true", help="print the counts of published outputs only")
    flags = parser.parse_args()
    if flags.counts:
        print(json.dumps(count_rewarded(flags)))
        return
    if flags.mathvista:
        logging.disable(logging.CRITICAL)
        compare_states(flags)
        return
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
