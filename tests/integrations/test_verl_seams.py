"""The list of what is relied on in verl and EasyR1 has every name that the sources import from them."""

import ast
from pathlib import Path

import pytest

from vgr_trl.integrations.verl import options as seams

ROOM = Path(seams.__file__).parent
PACKAGES = ("verl", "transfer_queue")


def imported(folder):
    """Modules, and names of modules as (module, name), that files import at their top."""
    for file in sorted((ROOM / folder).glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                yield from ((file.name, node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(
    ("folder", "points"), [("inside_verl", seams.OF_VERL), ("inside_easyr1", seams.OF_EASYR1)], ids=["verl", "EasyR1"]
)
def test_every_import_is_listed(folder, points):
    listed = {(point.module, point.name.split(".")[0]) for point in points}
    modules = {point.module for point in points}
    found = list(imported(folder))
    assert len(found) > 5
    for file, module, name in found:
        assert (module, name) in listed or f"{module}.{name}" in modules, f"{file}: {module}.{name}"
