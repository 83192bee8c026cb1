"""Which of a set's questions are wanted."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from vgr_trl.data.rows.questions import Candidate
from vgr_trl.errors import ConfigError


def read_ids(path: Path) -> set[str]:
    """Return the ids in a file: one per line, or a JSON list.

    Raises:
        ConfigError: the file does not exist, cannot be read, has none, or has something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
        found = json.loads(text) if text.startswith("[") else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"question_id_file is {path}, which cannot be read ({error}).") from error
    if any(isinstance(value, bool) or not isinstance(value, str | int) for value in found):
        raise ConfigError(f"question_id_file is {path}, whose list holds more than texts and whole numbers.")
    ids = {str(value).strip() for value in found} - {""}
    if not ids:
        raise ConfigError(f"question_id_file is {path}, which has no ids: give one per line.")
    return ids


class IdFilter:
    """Passes the questions with the given ids on; reasons pass too.

    Attributes:
        missing: ids that no question had; empty until all were read.
    """

    def __init__(self, ids: set[str]) -> None:
        self.missing: set[str] = set()
        self._ids = frozenset(ids)

    def __call__(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield the wanted ones of `candidates`."""
        met: set[str] = set()
        for origin, candidate in candidates:
            if isinstance(candidate, str):
                yield origin, candidate
            elif candidate.id in self._ids:
                met.add(candidate.id)
                yield origin, candidate
        self.missing = set(self._ids - met)
