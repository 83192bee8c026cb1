from typing import Any

from vgr_trl.reporting.records import Completion, Record


def completion(**changed: Any) -> Completion:
    fields: dict[str, Any] = {
        "question": "0" * 16, "group": 0, "prompt": "what?", "text": "red", "tokens": ["red", "."],
    }  # fmt: skip
    return Completion(**fields | changed)


def record(step: int = 0, mode: str = "train", *completions: Completion, time: float = 1.5) -> Record:
    return Record(step, mode, time, list(completions) or [completion()])
