"""The package of docs/extending.md, installed as one of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """A folder that the package has been installed into, with its entry points."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for language, name in (("python", "sight_methods.py"), ("toml", "pyproject.toml")):
        (source / name).write_text("\n\n".join(block for kind, block in blocks if kind == language))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile",
         "--no-index", "--disable-pip-version-check", "--target", target, source],
        check=True,
    )  # fmt: skip
    return target


@pytest.fixture
def installed(package, monkeypatch):
    """The package can be imported, and its entry points are found; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(package))
    yield package
    sys.modules.pop("sight_methods", None)
