"""Measurements as JSON lines: one line is written after every repeat, failures included."""

import json
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "results" / "gpu.jsonl"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "triton", "flash-attn", "flash-attn-3", "kernels")
Found = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One repeat of one run.

    Attributes:
        name: of what was measured, as in the plan or a test's id.
        run: of what is compared; empty where nothing is.
        machine: where, and with which releases.
        command: that continues it.
        found: what came out; `{"error": ...}` if it failed.
    """

    name: str
    run: str
    machine: dict[str, str]
    command: str
    found: Found


def append(path: Path, line: Line) -> None:
    """Write one line at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read(path: Path) -> list[Line]:
    """All lines; none if there is no file."""
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def runs_of(lines: Iterable[Line], name: str, key: str = "seconds") -> dict[str, list[Found]]:
    """What was found in every repeat of a measurement, by run; only what has `key`."""
    found = defaultdict(list)
    for line in lines:
        if line.name == name and key in line.found:
            found[line.run].append(line.found)
    return dict(found)


@cache
def machine(device: str) -> dict[str, str]:
    """The accelerator or processor, its driver, Python and the releases of what does the work."""
    found = {"device": device_name(device), "python": platform.python_version()}
    if device.startswith("cuda"):
        found["driver"] = _driver()
        found["cuda"] = str(torch.version.cuda)
    return found | {name: release for name in PACKAGES if (release := _release(name))}


def device_name(device: str) -> str:
    """As the driver calls it; processors by their architecture."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
