"""What `make demo` and `make test` install: versions that were tried together, one file per Python."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [each.split(" :: ")[-1] for each in PROJECT["classifiers"] if " :: 3." in each]


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_name_a_version_that_the_package_accepts(python):
    lines = (ROOT / "constraints" / f"{python}.txt").read_text(encoding="utf-8").splitlines()
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    asked = map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    pinned = [(each, versions.get(canonicalize_name(each.name))) for each in asked if each.name != "torch"]
    refused = [f"{each}: {version}" for each, version in pinned if version is None or version not in each.specifier]
    assert refused == [], "make constraints"
    builds = [
        line for line in lines if re.match("torch|triton|nvidia|cuda", line) or not re.match(r"[\w.-]+==[\w.]+$", line)
    ]
    assert builds == [], "another index has other builds of torch, with packages of their own"
