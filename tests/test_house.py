"""The layers of docs/design.md: imports run downwards, without circles."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import vgr_trl

ROOT = Path(vgr_trl.__file__).parent
BESIDE_SHARING = {f"vgr_trl.{name}" for name in ("errors", "patching", "pixels")}
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"


def modules() -> dict[str, Path]:
    names = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    found, tree = set(), ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in dotted}
    return found - {"vgr_trl"}


def test_imports_have_no_circle():
    known = modules()
    graph = {name: imported(file, known) - {name} for name, file in known.items() if name != "vgr_trl"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    assert len(graph) > 50


def test_sharing_is_read_in_one_folder():
    """Beside its own modules it imports pixels, token types, errors and patching alone."""
    known, room = modules(), "vgr_trl.sharing"
    used = {other for name, file in known.items() if name.startswith(room) for other in imported(file, known)}
    assert {name for name in used if not name.startswith(room)} <= BESIDE_SHARING


def test_imports_run_downwards():
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
    layers = {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}
    known = modules()
    pairs = {
        (name.split(".")[1], other.split(".")[1])
        for name, file in known.items()
        if name != "vgr_trl"
        for other in imported(file, known)
    }
    assert {one for pair in pairs for one in pair} <= set(layers), "give it a row in docs/design.md"
    assert [pair for pair in sorted(pairs) if pair[0] != pair[1] and layers[pair[1]] >= layers[pair[0]]] == []
