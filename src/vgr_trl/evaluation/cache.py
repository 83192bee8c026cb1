"""Evaluations that were made before: kept by model, data and settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig

from vgr_trl import __version__
from vgr_trl.data.rows.columns import images_of
from vgr_trl.evaluation.scores import Evaluation, Scores
from vgr_trl.files import write_whole

_TEXTS = ("prompt", "problem", "choices", "solution", "label_idx")
Kind = TypeVar("Kind", Scores, Evaluation)


class Cache:
    """Evaluations in a folder, each in a file of its own.

    Args:
        folder: made when something is kept; None: nothing is found and nothing kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find(self, key: str) -> Evaluation | None:
        """Return what was kept under `key`, if it can still be read."""
        if self.folder is None:
            return None
        try:
            values = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            groups = {name: _scores(Scores, group) for name, group in values.pop("groups").items()}
            return _scores(Evaluation, values | {"groups": groups})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def keep(self, key: str, result: Evaluation) -> None:
        """Keep `result`, completions included."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result.to_dict(records=True), default=str)
            write_whole(self.folder / f"{key}.json", text.encode())


def key_of(model: Mapping[str, Any], rows: str, settings: Mapping[str, Any]) -> str:
    """Return the name of an evaluation: the same for the same model, questions, settings and version."""
    said = {"version": __version__, "model": model, "rows": rows, "settings": settings}
    return sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_identity(name: str, revision: str | None) -> dict[str, Any]:
    """Return what tells a folder's or a hub model's weights from others: its files, or its commit."""
    folder = Path(name)
    if not folder.is_dir():
        commit = getattr(AutoConfig.from_pretrained(name, revision=revision), "_commit_hash", None)
        return {"name": name, "revision": commit or revision}
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return {"name": str(folder.resolve()), "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]}


def rows_identity(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of questions, answers and images."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps([row.get(name) for name in _TEXTS], sort_keys=True, default=str).encode())
        for image in images_of(row):
            digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
    return digest.hexdigest()


def _scores(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    known = {field.name for field in fields(kind)}
    given: Any = {
        name: tuple(value) if name == "interval" else value for name, value in values.items() if name in known
    }
    return kind(**given)
