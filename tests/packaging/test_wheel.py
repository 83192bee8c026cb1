import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from support.made_records import record

from vgr_trl import __version__
from vgr_trl.reporting.records import encode_entry

ROOT = Path(__file__).parents[2]
REPOSITORY, TAG = "https://github.com/someone/vgr", "v9.9"
COMMANDS = """
import vgr_trl
from vgr_trl.cli.__main__ import main
print(vgr_trl.__file__)
for command in ("recipes vppo", "path zero2", "init", "report run"):
    assert main(command.split()) == 0
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="build is in the extra dev")
    out = tmp_path_factory.mktemp("dist")
    words = [sys.executable, ROOT / "scripts" / "make_dist.py", REPOSITORY, TAG, out, "--no-isolation"]
    subprocess.run(words, check=True)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    site, (wheel,) = tmp_path_factory.mktemp("site"), built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    return os.environ | {"PYTHONPATH": str(site)}


def test_every_file_of_the_package_is_in_the_wheel(installed: dict[str, str]) -> None:
    def files(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in (folder / "vgr_trl").rglob("*.*") if path.suffix != ".pyc"}

    assert files(ROOT / "src") == files(Path(installed["PYTHONPATH"]))


def test_commands_run_from_the_wheel(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "records-000001.jsonl").write_bytes(encode_entry(record()))
    words = [sys.executable, "-P", "-c", COMMANDS]
    done = subprocess.run(words, env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert printed.startswith(installed["PYTHONPATH"])
    assert "method:" in printed
    (config,) = re.findall(r"^/.*zero2\.yaml$", printed, re.MULTILINE)
    assert config.startswith(installed["PYTHONPATH"])
    assert yaml.safe_load(Path(config).read_text())["deepspeed_config"]["zero_stage"] == 2
    assert (tmp_path / "train.yaml").exists()
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000


def test_links_of_the_metadata_are_absolute_and_lead_to_files(built: Path) -> None:
    markdown = pytest.importorskip("markdown_it", reason="markdown-it-py is in the extra dev")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    description = metadata.get_payload(decode=True).decode("utf-8")
    page = markdown.MarkdownIt("gfm-like", {"linkify": False}).render(description)
    links, images = (re.findall(pattern, page) for pattern in (r'href="([^"]+)"', r'src="([^"]+)"'))
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert {"Homepage", "Source", "Issues", "Documentation", "Changelog"} == urls.keys()
    assert len(links) > 20
    assert images
    for link in (*links, *images, *urls.values()):
        assert link.startswith("https://"), link
        if link.startswith(f"{REPOSITORY}/") and link != urls["Issues"]:
            kind, tag, path = link.partition("#")[0].removeprefix(f"{REPOSITORY}/").split("/", 2)
            assert (kind, tag) == ("raw" if link in images else "tree" if (ROOT / path).is_dir() else "blob", TAG)
            assert (ROOT / path).exists(), link


def test_one_version_is_told_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what its schema requires
    assert "version" not in citation  # it would be a second place
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0] == __version__
