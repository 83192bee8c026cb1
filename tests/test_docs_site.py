"""docs/ builds as a site in which no link is dead and nothing is loaded from elsewhere, and flags exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vgr_trl.cli.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("start.md", "troubleshooting.md", "negative_results.md", "zh/start.md")]
ELSEWHERE = {"--config_file", "--no-deps"}  # flags of accelerate and pip


def test_the_site_builds(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is in the extras docs and dev")
    words = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    loads = re.compile(
        r"""<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(?:https?:)?//[^"]*"""
    )
    assert [found for page in pages for found in loads.findall(page)] == []
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))


def test_flags_exist(capsys):
    known = ELSEWHERE
    for command in (["train", "--help-all"], ["evaluate", "--help"], ["quickstart", "--help"], ["init", "--help"]):
        with pytest.raises(SystemExit):
            main(command)
        known = known | set(re.findall(r"--\w+", capsys.readouterr().out))
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
        assert named <= known, (page.name, named - known)
