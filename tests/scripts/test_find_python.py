"""What `make` needs: said before anything is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "3.11"


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """An interpreter that answers every question about its version with no."""
    path = tmp_path / "python3.10"
    path.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; esac\necho Python 3.10.13\n')
    path.chmod(0o755)
    return path


def test_the_first_interpreter_that_serves_is_taken(old_python: Path):
    command = ["scripts/find_python.sh", "no-such-python", old_python, sys.executable]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{sys.executable}\n", "")


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing")
def test_make_says_what_it_needs_and_installs_nothing(old_python: Path, tmp_path: Path):
    for target in ("demo", "test"):
        command = ["make", target, f"PYTHON={old_python}", f"VENV={tmp_path / 'venv'}"]
        outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        made = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=False)
        assert made.returncode
        assert f"needs Python {OLDEST} or newer" in made.stderr
        assert f"{old_python}: Python 3.10.13" in made.stderr
        assert made.stdout == ""
        assert not (tmp_path / "venv").exists()
