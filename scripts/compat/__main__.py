"""Run a part of the tests with the oldest and newest releases that this library takes: `make compat`.

Each environment is built once, in a folder of its own below FOLDER, and built again when its requirements or those of
this library change; a row of docs/compatibility.md is written after each run. Tested is this checkout, whichever one an
environment was built from.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from environments import COMPARED, ENVIRONMENTS, TESTING, TESTS, Environment
from table import counts, row, with_row

TREE = Path(__file__).parents[2]
PAGE = TREE / "docs" / "compatibility.md"
READ = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
NAMES = [environment.name for environment in ENVIRONMENTS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of environments: {', '.join(NAMES)}")
    parser.add_argument("--folder", type=Path, default=TREE / ".venv-compat", help="that holds the environments")
    parser.add_argument("--python", default=sys.executable, help="that they are made with")
    args = parser.parse_args()
    failed = []
    for environment in (each for each in ENVIRONMENTS if each.name in args.names):
        python = build(environment, args.folder.absolute(), args.python)
        line, passes = refusal(environment, python) if environment.refused else tested(environment, python)
        PAGE.write_text(with_row(PAGE.read_text("utf-8"), line, NAMES), encoding="utf-8")
        print(line, flush=True)
        failed += [] if passes else [environment.name]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def build(environment: Environment, folder: Path, python: str) -> Path:
    """Return the interpreter of an environment, which is made if it is not there as it should be."""
    base = next(each.name for each in ENVIRONMENTS if each.refused is None and wanted(each) == wanted(environment))
    home = folder / base
    stamp, key = home / "installed.json", json.dumps(wanted(environment))
    own = home / "bin" / "python"
    if not stamp.is_file() or stamp.read_text("utf-8") != key:
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([python, "-m", "venv", home], check=True)
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, environment.torch], check=True)
        subprocess.run([*install, "--editable", str(TREE), *environment.packages, *TESTING], check=True)
        stamp.write_text(key, encoding="utf-8")
    return own


def wanted(environment: Environment) -> list[str]:
    """Return all requirements, those of this library among them."""
    declared: list[str] = tomllib.loads((TREE / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    return [environment.torch, *environment.packages, *TESTING, *declared]


def tested(environment: Environment, python: Path) -> tuple[str, bool]:
    """Return the row of an environment whose tests have been run, and whether none failed."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    subprocess.run(command, cwd=TREE, check=False, env=searching(TREE / "src") | {"HF_HUB_OFFLINE": "1"})
    passed, failures, skipped = counts(report)
    found = row(environment.name, versions(python), COMPARED, [f"{passed}", f"{failures}", f"{skipped}"])
    return found, failures == 0 and passed > 0


def refusal(environment: Environment, python: Path) -> tuple[str, bool]:
    """Return the row of a release of TRL that is laid over an environment, and whether it is refused in a sentence."""
    release = str(environment.refused)
    over = python.parents[2] / f"trl-{release}"
    if not over.is_dir():
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", over, f"trl=={release}"]
        subprocess.run(install, check=True)
    command = [python, "-c", "from vgr_trl import DAPOTrainer"]
    paths = searching(over, TREE / "src")
    run = subprocess.run(command, cwd=TREE, env=paths, capture_output=True, text=True, check=False)
    said = (run.stderr.strip().splitlines() or ["nothing"])[-1]
    refused = said.startswith("vgr_trl.errors.UnsupportedTRLError: ")
    found = {**versions(python), "trl": release}
    return row(environment.name, found, COMPARED, ["refused" if refused else "not refused", "", ""]), refused


def searching(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that looks for modules in these folders first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def versions(python: Path) -> dict[str, str]:
    """Return those of the compared packages."""
    command = [python, "-c", READ, *COMPARED]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip(COMPARED, found.split(), strict=True))


if __name__ == "__main__":
    main()
