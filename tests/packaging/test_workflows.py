"""The workflows call targets of the Makefile and nothing else, on the versions that the package names."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.releases import SUPPORTED_TRL

ROOT = Path(__file__).parents[2]
ADDRESS = "https://github.com/${{ github.repository }}"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
WORKFLOWS = {
    file.stem: yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
    for file in (ROOT / ".github" / "workflows").glob("*.yml")
}


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Each line that a job runs, once per value of its matrix."""
    lines = [line for step in job.get("steps", []) for line in step.get("run", "").splitlines()]
    for line in lines:
        found = re.findall(r"\$\{\{ matrix\.([\w-]+) \}\}", line)
        values = job["strategy"]["matrix"][found[0]] if found else [""]
        yield from (re.sub(r"\$\{\{ matrix\.[\w-]+ \}\}", value, line) for value in values)


def test_workflows_call_targets_of_the_makefile_only():
    for name, workflow in WORKFLOWS.items():
        for line in (line for job in workflow["jobs"].values() for line in commands(job)):
            program, *words = line.split()
            targets = {word for word in words if "=" not in word}
            assert program == "make", (name, line)
            assert targets, (name, line)
            assert targets <= TARGETS, (name, line)
            assert not set(";&|`$") & set(line), (name, line)


def test_every_check_runs_somewhere():
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    run = {word for job in jobs for line in commands(job) for word in line.split()}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    of_table = set(re.findall(r"^\| `make ([\w-]+)`", page, re.MULTILINE))
    no_runner_has = {"gpu", "real-size"}  # a GPU, 24 GB
    assert of_table - no_runner_has | {"lint", "types", "tests", "docs", "release", "check-tag"} <= run


def test_changes_are_tested_on_the_versions_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [each.split(" :: ")[-1] for each in project["classifiers"] if " :: 3." in each]
    jobs = WORKFLOWS["tests"]["jobs"]
    assert jobs["newest-trl"]["strategy"]["matrix"]["python"] == pythons
    assert jobs["oldest-trl"]["strategy"]["matrix"]["python"] == pythons
    assert [f"make compat COMPAT=trl-{SUPPORTED_TRL[0]} PYTHON=python"] == list(commands(jobs["oldest-trl"]))


def test_every_night_the_newest_releases_are_tested():
    nightly = WORKFLOWS["nightly"]
    assert nightly["env"]["CONSTRAINTS"] == ""
    assert "make test PYTHON=python" in commands(nightly["jobs"]["long"])


def test_a_release_knows_its_repository_and_its_tag():
    (environment,) = [step["env"] for step in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "env" in step]
    assert environment == {"REPOSITORY": ADDRESS, "TAG": "${{ github.ref_name }}"}
    assert WORKFLOWS["nightly"]["env"]["REPOSITORY"] == WORKFLOWS["docs"]["env"]["REPOSITORY"] == ADDRESS
    refused = subprocess.run(["make", "check-repository", "REPOSITORY="], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "REPOSITORY is not set: give its address" in refused.stdout
