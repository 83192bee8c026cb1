"""The machine that a benchmark ran on."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe_machine(threads: int) -> dict[str, Any]:
    """Return processor, cores, threads and the versions of the packages that do the work."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }


def read_commit() -> str:
    """Return the short name of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=RESULTS, capture_output=True, text=True).stdout.strip()


def processor_name() -> str:
    """Return the processor's name as Linux gives it, else Python's guess."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
