"""The floors of docs/design.md: a room imports only rooms below it, and has few files."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import vgr_trl

ROOT = Path(vgr_trl.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
FACE = {"__init__"}  # hands names on, at the package's root
MOST = 14  # files of a room


def floors() -> dict[str, int]:
    """Return the floor of every room of the table in the design, by name without ending."""
    table = re.findall(r"^\| (\d+) \| (.+?) \|", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        room.removesuffix("/").removesuffix(".py"): int(floor)
        for floor, rooms in table
        for room in re.findall(r"`([\w./]+)`", rooms)
    }


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name, without the package, of what a file imports of this library, within functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("vgr_trl."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vgr_trl"):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def room_of(dotted: str, known: dict[str, int]) -> str | None:
    """Return the most exact room of the design that holds a module, None for the package itself."""
    parts = dotted.split(".")[1:]
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in known), None)


def test_every_file_has_a_floor() -> None:
    known = floors()
    files = [file.relative_to(ROOT).with_suffix("") for file in ROOT.rglob("*.py")]
    homeless = [str(file) for file in files if room_of(".".join(("vgr_trl", *file.parts)), known) is None]
    assert set(homeless) <= FACE, "give it a row in the table of docs/design.md"


def test_imports_run_downwards() -> None:
    known, upwards = floors(), []
    for file in sorted(ROOT.rglob("*.py")):
        here = room_of(".".join(("vgr_trl", *file.relative_to(ROOT).with_suffix("").parts)), known)
        for line, dotted in imports(file) if here else ():
            there = room_of(dotted, known)
            if there is not None and there != here and known[there] >= known[here]:
                upwards.append(f"{file.relative_to(ROOT)}:{line}: {here} ({known[here]}) -> {there} ({known[there]})")
    assert upwards == []


@pytest.mark.parametrize("root", [ROOT, Path(__file__).parent], ids=["src", "tests"])
def test_no_folder_has_many_files(root: Path) -> None:
    files = Counter(file.parent.relative_to(root).as_posix() for file in root.rglob("*.py"))
    assert {folder: count for folder, count in files.items() if count > MOST} == {}
