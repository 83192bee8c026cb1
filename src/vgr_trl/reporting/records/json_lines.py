"""Rollout records as lines of JSON, which has no NaN and no infinity: both are null."""

import base64
import json
import math
import re
from dataclasses import asdict, fields
from typing import Any

from vgr_trl.errors import DataError
from vgr_trl.reporting.records.record import MODES, AttentionMap, Completion, LogEntry, Record, RecordedImage

VERSION = 1
_DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
_IMAGE_FILE = re.compile(r"images/\w[\w.-]*")  # a record must not make readers open other files


def encode_record(record: Record) -> str:
    """Return a record as a line of JSON, without the line break. Version, step and mode come first."""
    head = {"version": VERSION, "step": record.step, "mode": record.mode, "time": _rounded(record.time)}
    return _as_json({**head, "completions": [_completion_as_json(completion) for completion in record.completions]})


def decode_record(line: str) -> Record:
    """Return the record in a line of JSON; keys it does not know are left out.

    Raises:
        DataError: it is no record, or one of a later version.
    """
    loaded = _head(line, "record")
    try:
        completions = [_completion(item) for item in loaded["completions"]]
        return Record(int(loaded["step"]), str(loaded["mode"]), float(loaded.get("time") or 0), completions)
    except _DAMAGED as error:
        raise DataError(f"A record is damaged ({type(error).__name__}: {error}): it is left out.") from error


def encode_log(entry: LogEntry) -> str:
    """Return a log entry as a line of JSON, without the line break."""
    head = {"version": VERSION, "step": entry.step, "mode": entry.mode, "time": _rounded(entry.time)}
    return _as_json({**head, "values": entry.values})


def decode_log(line: str) -> LogEntry:
    """Return the log entry in a line of JSON.

    Raises:
        DataError: it is none, or one of a later version.
    """
    loaded = _head(line, "log entry")
    try:
        values = {str(name): _number(value) for name, value in loaded["values"].items()}
        return LogEntry(int(loaded["step"]), str(loaded["mode"]), float(loaded.get("time") or 0), values)
    except _DAMAGED as error:
        raise DataError(f"A log entry is damaged ({type(error).__name__}: {error}): it is left out.") from error


def check_version(version: Any, what: str) -> None:
    """Raise `DataError` unless `version` is one that this release reads."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DataError(f"{what} has the version {version!r}, but versions are integers from 1: write the run anew.")
    if version > VERSION:
        raise DataError(
            f"{what} has the version {version}, but this release of vgr_trl reads versions up to {VERSION}: install a "
            "later one."
        )


def _head(line: str, what: str) -> dict[str, Any]:
    try:
        loaded = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"A {what} is no JSON ({error}): it is left out.") from error
    if not isinstance(loaded, dict):
        raise DataError(f"A {what} is a {type(loaded).__name__} of JSON and no object: it is left out.")
    check_version(loaded.get("version"), f"A {what}")
    if loaded.get("mode") not in MODES:
        raise DataError(f"A {what} has the mode {loaded.get('mode')!r}, neither train nor eval: it is left out.")
    return loaded


def _completion_as_json(completion: Completion) -> dict[str, Any]:
    values = {item.name: getattr(completion, item.name) for item in fields(completion)}
    values["images"] = [asdict(image) for image in completion.images]
    if (attention := completion.attention) is not None:
        encoded = base64.b64encode(attention.values).decode("ascii")
        values["attention"] = {"scale": attention.scale, "values": encoded}
    return values


def _completion(item: dict[str, Any]) -> Completion:
    known = {name.name for name in fields(Completion)}
    values = {name: value for name, value in item.items() if name in known}
    values |= {name: str(item[name]) for name in ("question", "prompt", "text")}
    values |= {name: _number(item.get(name)) for name in ("reward", "advantage")}
    values["replaced"] = _truth(item.get("replaced", False))
    values["correct"] = None if item.get("correct") is None else _truth(item["correct"])
    values["solution"] = None if item.get("solution") is None else str(item["solution"])
    values["group"] = int(item["group"])
    values["tokens"] = [str(piece) for piece in item["tokens"]]
    count = len(values["tokens"])
    for name in ("weights", "dependency", "vgr", "advantages", "entropies", "logps", "changes"):
        if (numbers := item.get(name)) is not None:
            values[name] = [_number(number) for number in numbers]
            if len(numbers) != count:
                raise ValueError(f"{len(numbers)} {name} for {count} tokens")
    values["rewards"] = {str(name): _number(value) for name, value in (item.get("rewards") or {}).items()}
    if (metrics := item.get("metrics")) is not None:
        values["metrics"] = {
            str(segment): {str(name): _number(value) for name, value in quantities.items()}
            for segment, quantities in metrics.items()
        }
    values["images"] = [_image(image) for image in item.get("images") or []]
    if (attention := item.get("attention")) is not None:
        values["attention"] = _attention(attention, count)
    return Completion(**values)


def _image(item: dict[str, Any]) -> RecordedImage:
    grid = item.get("grid")
    size = None if grid is None else (int(grid[0]), int(grid[1]))
    width, height = int(item["width"]), int(item["height"])
    if min(width, height, *(side - 1 for side in size or ())) < 0:
        raise ValueError(f"an image of {width}x{height} pixels and {size} vision tokens")
    for file in (item.get("file"), item.get("perturbed")):
        if file is not None and not _IMAGE_FILE.fullmatch(file):
            raise ValueError(f"an image in {file!r}, outside of the folder images")
    regions = item.get("regions")
    boxes = None if regions is None else [_box(region) for region in regions]
    return RecordedImage(item.get("file"), width, height, size, boxes, item.get("perturbed"))


def _box(region: Any) -> tuple[float, float, float, float]:
    left, top, width, height = (float(side) for side in region)
    return left, top, width, height


def _attention(item: dict[str, Any], count: int) -> AttentionMap | None:
    scale, values = [float(value) for value in item["scale"]], base64.b64decode(item["values"], validate=True)
    if len(scale) != count or (count and len(values) % count):
        raise ValueError(f"attention of {len(scale)} tokens in {len(values)} bytes for {count} tokens")
    if not all(map(math.isfinite, scale)):
        raise ValueError(f"attention with the scale {scale}")
    return AttentionMap(scale, values) if count else None


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} in the place of true or false")
    return value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _rounded(value: float) -> float | None:
    """Six significant digits: files are half as large, and nobody sees more. Times and counts keep a tenth."""
    if not math.isfinite(value):
        return None
    return (float(f"{value:.6g}") if abs(value) < 1e5 else round(value, 1)) or 0.0  # not -0.0


def _as_json(value: Any) -> str:
    return json.dumps(writable(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def writable(value: Any) -> Any:
    """Numbers rounded, those that are not finite as None, texts without lone surrogates, which UTF-8 cannot hold."""
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {writable(str(name)): writable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [writable(item) for item in value]
    return value
