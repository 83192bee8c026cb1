"""What the flag `--data_files` says."""

from glob import glob
from pathlib import Path

from vgr_trl.errors import ConfigError


def parse_data_files(text: str) -> dict[str, list[Path]]:
    """Return split → files of `train=a.jsonl+b.jsonl,test=c.parquet`; a split may be named again for another file.

    A file without a split is of the split `train`. A name with `*` or `?` stands for the files that it fits.

    Raises:
        ConfigError: a split or a file has no name.
    """
    files: dict[str, list[Path]] = {}
    for part in text.split(","):
        name, path = part.split("=", 1) if "=" in part else ("train", part)
        names = [path.strip()] if Path(path.strip()).exists() else [one.strip() for one in path.split("+")]
        if not name.strip() or not path.strip() or not all(names):
            raise ConfigError(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c.parquet.")
        for one in names:
            files.setdefault(name.strip(), []).extend(_matching(one))
    for split, paths in files.items():
        if len({path.resolve() for path in paths}) != len(paths):
            raise ConfigError(f"data_files is {text!r}, which names a file of {split} twice: name each once.")
    return files


def _matching(path: str) -> list[Path]:
    found = sorted(glob(path)) if set(path) & set("*?") else []
    return [Path(name) for name in found or [path]]
