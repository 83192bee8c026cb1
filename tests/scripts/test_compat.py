"""The environments of `make compat`, and the table it writes: the bounds of this library are what was run."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TREE = Path(__file__).parents[2]
PAGE = TREE / "docs" / "compatibility.md"
DECLARED = {
    requirement.name: requirement
    for requirement in map(Requirement, tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["dependencies"])
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"compat_{name}", TREE / "scripts" / "compat" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


environments, table = load("environments"), load("table")
BY_NAME = {environment.name: environment for environment in environments.ENVIRONMENTS}


def rows():
    lines = PAGE.read_text("utf-8").split(table.BEGIN)[1].split(table.END)[0].strip().splitlines()
    head, _, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in found}


def test_the_oldest_environment_is_made_of_the_lower_bounds():
    oldest = BY_NAME["oldest"]
    pinned = {requirement.name: requirement for requirement in map(Requirement, (oldest.torch, *oldest.packages))}
    lowest = {
        name: next(each.version for each in requirement.specifier if each.operator == ">=")
        for name, requirement in DECLARED.items()
        if name != "trl"
    }
    assert lowest.keys() == pinned.keys() - {"trl"}
    for name, version in lowest.items():
        (exactly,) = pinned[name].specifier
        assert exactly.operator == "=="
        assert exactly.version == version or exactly.version.startswith(f"{version}."), name


@pytest.mark.parametrize("name", BY_NAME)
def test_every_environment_was_run_and_nothing_failed(name):
    row = rows().get(name)
    if row is None:
        assert f"- `{name}`: not run yet" in PAGE.read_text("utf-8")
    elif BY_NAME[name].refused:
        assert row["trl"] == BY_NAME[name].refused
        assert row["passed"] == "refused"
    else:
        assert int(row["passed"]) > 300
        assert row["failed"] == "0"


def test_the_environments_of_a_release_of_trl_have_it():
    for name, row in rows().items():
        if name.startswith("trl-"):
            assert row["trl"].startswith(f"{name.removeprefix('trl-')}.")
    refused = [name for name, environment in BY_NAME.items() if environment.refused]
    for name, row in rows().items():
        assert DECLARED["trl"].specifier.contains(row["trl"]) == (name not in refused)


def test_what_the_tests_replace_is_said():
    for environment in BY_NAME.values():
        assert environment.replaced in PAGE.read_text("utf-8")


def test_the_tests_that_run_are_there():
    assert [path for path in environments.TESTS if not (TREE / path).exists()] == []


def test_a_row_takes_the_place_of_that_of_its_environment():
    page = f"# Page\n\n{table.BEGIN}| environment | trl |\n|---|---|\n| b | 2 |\n| gone | 0 |\n{table.END}\nMore.\n"
    order = ["a", "b", "c"]
    page = table.with_row(page, table.row("c", {"trl": "3"}, ["trl"], []), order)
    page = table.with_row(page, table.row("a", {"trl": "1"}, ["trl"], []), order)
    page = table.with_row(page, table.row("b", {"trl": "2.1"}, ["trl"], []), order)
    rows = "| environment | trl |\n|---|---|\n| a | 1 |\n| b | 2.1 |\n| c | 3 |\n"
    assert page == f"# Page\n\n{table.BEGIN}{rows}{table.END}\nMore.\n"


def test_errors_count_as_failures(tmp_path):
    report = tmp_path / "report.xml"
    suites = '<testsuite tests="7" failures="1" errors="2" skipped="1"/><testsuite tests="3"/>'
    report.write_text(f"<testsuites>{suites}</testsuites>")
    assert table.counts(report) == (6, 3, 1)


def test_the_readme_names_the_releases_of_trl():
    first, end = re.findall(r"\d+\.\d+", str(DECLARED["trl"].specifier))
    names = sorted({first, end}, key=lambda version: tuple(map(int, version.split("."))))
    from vgr_trl.utils import SUPPORTED

    assert tuple(names) == SUPPORTED
