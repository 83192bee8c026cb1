"""Measurements as JSON lines: one line is written when one measurement is done, failures included."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "results" / "gpu.jsonl"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "triton", "flash-attn", "flash-attn-3", "kernels")


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        name: of what was measured, as in the plan or a test's id.
        machine: where, and with which releases.
        command: that measures it again.
        found: what came out; `{"error": ...}` if it failed.
    """

    name: str
    machine: dict[str, str]
    command: str
    found: dict[str, Any] = field(default_factory=dict)


def append(path: Path, line: Line) -> None:
    """Write one line at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read(path: Path) -> dict[str, Line]:
    """The newest line of every name; none if there is no file."""
    if not path.exists():
        return {}
    lines = (Line(**json.loads(text)) for text in path.read_text().splitlines() if text)
    return {line.name: line for line in lines}


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
