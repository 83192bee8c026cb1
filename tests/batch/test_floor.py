"""The room of batches lies on the ground: it knows no other room, and no TRL."""

import ast
from pathlib import Path

import vgr_trl.batch


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_batch_imports_nothing_above_errors():
    files = sorted(Path(vgr_trl.batch.__path__[0]).glob("*.py"))
    found = {module for path in files for module in imported(path) if module.split(".")[0] in ("vgr_trl", "trl")}
    assert "vgr_trl.errors" in found
    assert {module for module in found if not module.startswith(("vgr_trl.batch", "vgr_trl.errors"))} == set()
