"""The manifest of a checkpoint: what it consists of, written last and removed first."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_manifest(folder: str | Path, num_processes: int = 1) -> None:
    """Name every file of a checkpoint with its size and SHA-256, which makes the checkpoint complete.

    Call it by hand on a checkpoint of TRL or of vgr_trl before 0.2 that is known to be whole.

    Args:
        num_processes: how many saved it.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum}
        for path, checksum in zip(paths, _checksums(paths), strict=True)
    }
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_text(json.dumps({"num_processes": num_processes, "files": files}, indent=1), encoding="utf-8")
    unfinished.replace(folder / MANIFEST)


def remove_manifest(folder: Path) -> None:
    """Make a checkpoint incomplete, before any of its files is written anew."""
    (folder / MANIFEST).unlink(missing_ok=True)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, None if it has none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {
            name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in manifest["files"].items()
        }
        return {"num_processes": int(manifest["num_processes"]), "files": files}
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError):
        return None


def what_differs(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """Return which file of a checkpoint is not as its manifest says, None if all are; sizes are compared first."""
    for name, expected in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
    for (name, expected), checksum in zip(files.items(), _checksums(folder / name for name in files), strict=True):
        if checksum != expected["sha256"]:
            return f"{name} differs from its checksum"
    return None


def _checksums(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing lets go of the interpreter's lock
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
