"""The environments of `make compat`: the bounds of this library are what is run."""

import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

TREE = Path(__file__).parents[2]
DECLARED = {
    requirement.name: requirement
    for requirement in map(Requirement, tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["dependencies"])
}


def test_the_oldest_environment_is_made_of_the_lower_bounds():
    environments = runpy.run_path(str(TREE / "scripts" / "compat" / "environments.py"))["ENVIRONMENTS"]
    (oldest,) = [environment for environment in environments if environment.name == "oldest"]
    pinned = {requirement.name: requirement for requirement in map(Requirement, (oldest.torch, *oldest.packages))}
    lowest = {
        name: next(each.version for each in requirement.specifier if each.operator == ">=")
        for name, requirement in DECLARED.items()
        if name != "trl"
    }
    assert lowest.keys() == pinned.keys() - {"trl", "torchvision"}
    for name, version in lowest.items():
        (exactly,) = pinned[name].specifier
        assert exactly.operator == "=="
        assert exactly.version == version or exactly.version.startswith(f"{version}."), name
