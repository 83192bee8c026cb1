"""docs/ builds as a site in which no link is dead and nothing is loaded from elsewhere, and flags exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.arguments import ALIASES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *(ROOT / "docs").rglob("*.md")]
ELSEWHERE = {"--help-all", "--config_file", "--no-deps", "--logdir", "--include_path", "--model_args", "--output_path",
             "--tasks", "--runs", "--seeds"}  # fmt: skip
COMMANDS = ("train --help-all", "evaluate -h", "quickstart -h", "init -h", "report -h", "demo -h", "data convert -h",
            "data merge -h", "data inspect -h")  # fmt: skip


def test_the_site_builds(tmp_path):
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason="mkdocs-material and mkdocstrings are in the extras docs and dev")
    words = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    loads = re.compile(
        r"""<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(?:https?:)?//[^"]*"""
    )
    assert [found for page in pages for found in loads.findall(page)] == []
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    for name in ("trainer.DAPOTrainer", "rewards.accuracy_reward", "signals.RolloutScorer", "sharing.share_prompts"):
        assert f'id="vgr_trl.{name}"' in reference, name


def test_flags_exist(capsys):
    known = ELSEWHERE | {f"--{alias}" for alias in ALIASES}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main(command.split())
        known = known | set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for page in (page for page in PAGES if page.name != "migration.md"):  # which names the flags of others
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
        assert named <= known, (page.name, named - known)
