"""Change the library in one place at a time, and see whether the tests of that room notice: `make mutants`.

A copy of the tree is changed, never the tree itself. A mutant meets the tests that call the function it is in, the
quickest first, then the other tests of the same files; a test that hangs has noticed. Tests of other rooms, and what
runs in other processes than pytest's own, are not asked unless a file of the room starts them.
"""

import argparse
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from changes import Mutant, mutants_of
from running import Calls, load_packages, notice, record_calls

TREE = Path(__file__).parents[2]
ROOMS = {
    room: (f"src/vgr_trl/{room}/**/*.py", (f"tests/{room}/**/test_*.py", *more))
    for room, *more in (
        ("credit",),
        ("rewards",),
        ("sampling",),
        ("batch", "tests/sampling/test_*.py"),
        ("signals",),
        ("sharing",),
        ("training", "tests/test_trainer.py", "tests/reporting/records/test_record*.py"),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--sample", type=int, default=400, help="mutants of all rooms together, by their number there")
    parser.add_argument("--per-room", type=int, help="mutants of each room, instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a processor, for the tests of a mutant")
    parser.add_argument("--budget", type=float, default=float("inf"), help="minutes per room; what is left is not run")
    parser.add_argument("--skip", nargs="+", default=[], help="names of test files that take too long")
    parser.add_argument("--again", type=Path, help="a table of survivors: try only those, in the place of a sample")
    parser.add_argument("--out", type=Path, default=Path("mutants.md"), help="the table of survivors")
    args = parser.parse_args()

    load_packages()
    found = {room: list(mutants_in(TREE, ROOMS[room][0])) for room in args.rooms}
    if args.again:
        wanted = {without_line(line) for line in args.again.read_text("utf-8").splitlines()}
        found = {
            room: [one for one in those if without_line(described(one[0], one[2])) in wanted]
            for room, those in found.items()
        }
        args.per_room = sum(map(len, found.values()))
    total = sum(map(len, found.values()))
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder) / "tree")
        if (recorded := TREE.parent / "shared").is_dir():  # numbers of published code, which some tests compare with
            (Path(folder) / "shared").symlink_to(recorded)
        report = ["| room | mutants | tried | noticed |", "|---|---|---|---|"]
        survivors: list[str] = []
        for room, mutants in found.items():
            count = args.per_room or round(args.sample * len(mutants) / total)
            sample = random.Random(args.seed).sample(mutants, min(count, len(mutants)))
            tried, missed = run_room(room, sample, root, args)
            report.append(f"| {room} | {len(mutants)} | {tried} | {tried - len(missed)} |")
            survivors += missed
            args.out.write_text("\n".join([*report, "", *survivors, ""]), encoding="utf-8")
            print(report[-1], flush=True)


def copied(folder: Path) -> Path:
    """Copy what tests need of the tree into a new folder."""
    folder.mkdir()
    for path in sorted(TREE.iterdir()):
        if path.name.startswith(".") or path.name in ("report_page", "build"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(path, folder / path.name)
    return folder


def mutants_in(tree: Path, pattern: str) -> Iterator[tuple[str, str, Mutant]]:
    """Names of files, what they hold, and a change of each place."""
    for file in sorted(tree.glob(pattern)):
        source = file.read_text("utf-8")
        for mutant in mutants_of(source):
            yield str(file.relative_to(tree)), source, mutant


def run_room(
    room: str, sample: list[tuple[str, str, Mutant]], root: Path, args: argparse.Namespace
) -> tuple[int, list[str]]:
    """How many were tried, and lines on those that no test noticed."""
    started = time.monotonic()
    files = sorted(path for pattern in ROOMS[room][1] for path in root.glob(pattern))
    calls = record_calls(root, [str(path.relative_to(root)) for path in files if path.name not in args.skip])
    print(f"{room}: {len(calls.seconds)} tests in {time.monotonic() - started:.0f} s", flush=True)
    survivors, tried = [], 0
    for name, source, mutant in sample:
        if time.monotonic() - started > 60 * args.budget:
            break
        (root / name).write_text(mutant.applied_to(source), encoding="utf-8")
        try:
            noticed = is_noticed(name, mutant, calls, root, args.seconds)
        finally:
            (root / name).write_text(source, encoding="utf-8")
        tried += 1
        if not noticed:
            survivors.append(described(name, mutant))
            print(survivors[-1], flush=True)
    return tried, survivors


def is_noticed(name: str, mutant: Mutant, calls: Calls, root: Path, seconds: float) -> bool:
    """Whether a test notices the mutant that has been written into the copy."""
    file = str(Path(name).relative_to("src"))
    tests = calls.reaching(file, mutant.function)
    quick: list[str] = []
    used = 0.0
    for test in tests:
        used += calls.seconds[test]
        if quick and used > seconds / 2:
            break
        quick.append(test)
    if notice(root, quick, seconds):
        return True
    files = sorted({test.split("::")[0] for test in tests} & {test.split("::")[0] for test in quick})
    whole = [one for one in files if sum(s for test, s in calls.seconds.items() if test.startswith(one)) < seconds / 2]
    return bool(whole) and notice(root, whole, seconds)


def described(name: str, mutant: Mutant) -> str:
    """As in the table of survivors."""
    return f"- `{name}:{mutant.line}` `{short(mutant.before)}` → `{short(mutant.after)}`"


def without_line(survivor: str) -> str:
    """A line of that table without the number of the line, which changes with the file."""
    return re.sub(r":\d+`", "`", survivor, count=1)


def short(code: str) -> str:
    """On one line of at most 150 characters."""
    line = " ".join(code.split()).replace("`", "'")
    return line if len(line) <= 150 else f"{line[:147]}..."


if __name__ == "__main__":
    main()
