"""Records of rollouts in the folder `rollouts` of a run: what they hold, and how they are written and read.

`records-000001.jsonl` has a line of JSON per recorded rollout batch, `logs.jsonl` one per log of the trainer, `images`
the thumbnails, `run.json` the options. A line is appended by one call, so that a kill costs at most the last one. JSON
has neither NaN nor infinity: both are null.
"""

import base64
import io
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from sys import intern
from typing import Any

from transformers.utils import logging

from vgr_trl.utils import ConfigError, DataError, append_atomic, is_writable, write_atomic

logger = logging.get_logger(__name__)

VERSION = 1
FOLDER, RUN_FILE, LOGS_FILE, RECORD_FILES = "rollouts", "run.json", "logs.jsonl", "records-*.jsonl"
Numbers = list[float | None]

_HEAD_PATTERN = re.compile(rb'\{"version":(\d{1,9}),"step":(\d{1,18}),"mode":"(train|eval)"')
_THUMBNAIL_PATTERN = re.compile(rb'"images/(\w+\.webp)"')
_DAMAGED_LINE_ERRORS = (ValueError, TypeError, KeyError, AttributeError)  # what a line raises that a kill has cut
_MAX_FILES = 16  # of records within the bound of bytes, beyond which the oldest is removed


@dataclass
class RecordedImage:
    """An image of a prompt.

    Attributes:
        file: of its thumbnail, relative to the folder of the records; None if there is none.
        width, height: of the image itself, in pixels.
        grid: rows and columns of its vision tokens; None if they are not known.
        regions: left, top, width and height in pixels of what the question is about; None if the data do not say it.
        perturbed: file of a thumbnail of the image as it was perturbed for the dependency; None if it was not.
    """

    file: str | None
    width: int
    height: int
    grid: Sequence[int] | None = None
    regions: Sequence[Sequence[float]] | None = None
    perturbed: str | None = None


@dataclass
class AttentionMap:
    """Attention of T tokens over V vision tokens, those of all images of the prompt in order, one byte each.

    Attributes:
        scale: T numbers; the attention of token t on vision token v is scale[t] · byte / 255.
        values: T · V bytes, token by token.
    """

    scale: list[float]
    values: bytes

    def row(self, token: int) -> list[float]:
        """Return the attention of one token, V numbers in [0, 1]; they sum to its mass on the images."""
        width = len(self.values) // len(self.scale)
        return [self.scale[token] * byte / 255 for byte in self.values[token * width : (token + 1) * width]]


@dataclass
class Completion:
    """A completion of T tokens with its measurements and rewards; lists of tokens are of length T, or None.

    Attributes:
        question: the same for the same prompt with the same images, at every step.
        group: number of the prompt within its rollout batch.
        prompt: as the model saw it, with one `<image>` for the tokens of an image.
        text: without special tokens.
        tokens: T pieces of text, special tokens included.
        solution: as text, if the data have one.
        weights: of the tokens' credit.
        dependency: on the image, in nats.
        vgr: vision gain ratio, over the layers that rewards read.
        advantages: what the loss reads; None if it was not trained on.
        entropies, logps: under the policy that generated, in nats.
        changes: of the log-probability when the image is perturbed, in nats.
        rewards: by name, unweighted.
        reward: their weighted sum.
        advantage: of the whole completion.
        correct: whether the accuracy reward is 1; None without one.
        metrics: by segment of layers, then by quantity.
        images: of the prompt, in order.
        attention: over the vision tokens of all images, the mean over heads and over the layers that rewards read.
        replaced: whether another group took the place of its group, so that it was not trained on.
    """

    question: str
    group: int
    prompt: str
    text: str
    tokens: list[str]
    solution: str | None = None
    weights: Numbers | None = None
    dependency: Numbers | None = None
    vgr: Numbers | None = None
    advantages: Numbers | None = None
    entropies: Numbers | None = None
    logps: Numbers | None = None
    changes: Numbers | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    correct: bool | None = None
    metrics: dict[str, dict[str, float | None]] | None = None
    images: list[RecordedImage] = field(default_factory=list)
    attention: AttentionMap | None = None
    replaced: bool = False


@dataclass
class Record:
    """Completions of one rollout batch.

    Attributes:
        step: optimizer steps that the policy had behind it when it generated them.
        mode: `train` or `eval`.
        time: in seconds since 1970.
    """

    step: int
    mode: str
    time: float
    completions: list[Completion]


@dataclass
class LogEntry:
    """Values that the trainer logged at a step; None where a value is not finite."""

    step: int
    mode: str
    time: float
    values: dict[str, float | None]


def encode_entry(entry: Record | LogEntry) -> bytes:
    """Return a line of JSON; version, step and mode come first."""
    content = to_json_value({"version": VERSION, **asdict(entry)})
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"  # a lone surrogate becomes a question mark


def to_json_value(value: Any) -> Any:
    """Return what JSON can hold: floats with six digits, None for those that are not finite, bytes in base64."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return (float(f"{value:.6g}") if abs(value) < 1e5 else round(value, 1)) or 0.0  # not -0.0
    if isinstance(value, dict):
        return {name: to_json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def decode_record(line: bytes) -> Record:
    """Return the record in a line of JSON; keys that are not known are left out."""
    content = json.loads(line)
    completions = []
    for item in content["completions"]:
        values = _known_fields(Completion, item)
        values["images"] = [RecordedImage(**_known_fields(RecordedImage, image)) for image in item.get("images", ())]
        if (attention := item.get("attention")) is not None:
            values["attention"] = AttentionMap(attention["scale"], base64.b64decode(attention["values"]))
        completions.append(Completion(**values))
    return Record(content["step"], content["mode"], content["time"], completions)


def _known_fields(kind: type, item: Mapping[str, Any]) -> dict[str, Any]:
    return {known.name: item[known.name] for known in fields(kind) if known.name in item}


class RecordWriter:
    """Writes the records of a run, within a bound of bytes.

    Where records and thumbnails get larger than the bound, the oldest file is removed with the thumbnails that only it
    names, except the first one, which shows how the run began.

    Args:
        description: content of `run.json` besides version and time.
        max_bytes: bound of records and thumbnails together.
        resumed: whether the run continues; otherwise existing records are moved to `rollouts.1`.
    """

    def __init__(self, output_dir: Path, description: Mapping[str, Any], max_bytes: int, resumed: bool) -> None:
        self.folder, self.max_bytes = output_dir / FOLDER, max_bytes
        if self.folder.exists() and not resumed:
            number = next(number for number in count(1) if not (output_dir / f"{FOLDER}.{number}").exists())
            self.folder.rename(self.folder.with_suffix(f".{number}"))
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        if not (self.folder / RUN_FILE).exists():
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"version": VERSION, "created": created, **description}, indent=2, default=str)
            write_atomic(self.folder / RUN_FILE, text.encode(), sync=False)
        if (self.folder / LOGS_FILE).exists():
            append_atomic(self.folder / LOGS_FILE, b"\n")  # ends a line that a kill has cut
        self._file, self._size = self._new_file(), self._count_bytes()

    def add(self, record: Record, thumbnails: Mapping[str, bytes]) -> None:
        """Append a record, and write the files `images/….webp` that it names and that do not exist yet."""
        for name, content in thumbnails.items():
            if not (self.folder / name).exists():
                write_atomic(self.folder / name, content, sync=False)
                self._size += len(content)
        line = encode_entry(record)
        if self._file.exists() and self._file.stat().st_size + len(line) > self.max_bytes // _MAX_FILES:
            self._file = self._new_file()
        append_atomic(self._file, line)
        self._size += len(line)
        for oldest in sorted(self.folder.glob(RECORD_FILES))[1:-1]:
            if self._size <= self.max_bytes:
                return
            oldest.unlink()
            lines = b"".join(file.read_bytes() for file in self.folder.glob(RECORD_FILES))
            named = {name.decode() for name in _THUMBNAIL_PATTERN.findall(lines)}
            for image in (self.folder / "images").iterdir():
                if image.name not in named:
                    image.unlink()
            self._size = self._count_bytes()

    def log(self, entry: LogEntry) -> None:
        """Append what the trainer has logged."""
        append_atomic(self.folder / LOGS_FILE, encode_entry(entry))

    def _new_file(self) -> Path:
        """A new file, also for a run that continues: a kill may have cut the last line of the one before."""
        numbers = [int(path.stem.removeprefix("records-")) for path in self.folder.glob(RECORD_FILES)]
        return self.folder / f"records-{max(numbers, default=0) + 1:06d}.jsonl"

    def _count_bytes(self) -> int:
        return sum(
            path.stat().st_size for path in (*self.folder.glob(RECORD_FILES), *(self.folder / "images").iterdir())
        )


class Run:
    """The records of a run, read one at a time.

    Attributes:
        folder: of the records.
        description: content of `run.json`: name, created, rewards, model, options; empty if it cannot be read.
        name: of the run, by default that of its folder.
        rewards: their names, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.description = folder, dict[str, Any]()
        with suppress(OSError, ValueError):
            self.description = json.loads((folder / RUN_FILE).read_bytes())
        _check_version(self.description.get("version", 1), folder / RUN_FILE)
        self.name = str(self.description.get("name") or folder.resolve().parent.name)
        self.rewards: list[str] = self.description.get("rewards", [])
        self._places: dict[tuple[int, str], tuple[Path, int]] = {}
        for path in sorted(folder.glob(RECORD_FILES)):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    if (head := _HEAD_PATTERN.match(line)) and line.endswith(b"}\n"):
                        _check_version(int(head[1]), path)
                        self._places[int(head[2]), head[3].decode()] = path, offset
                    else:
                        _warn_unreadable(path)
                    offset += len(line)

    def steps(self, mode: str | None = None) -> list[tuple[int, str]]:
        """Return step and mode of the records, in order; those of one mode if it is given."""
        return sorted(key for key in self._places if mode in (None, key[1]))

    def records(self, mode: str | None = None) -> Iterator[Record]:
        """Read the records one by one, in the order of their steps; of a step that was run twice, the last."""
        for key in self.steps(mode):
            if (record := self.record(*key)) is not None:
                yield record

    def record(self, step: int, mode: str) -> Record | None:
        """Return the record of a step that `steps` names; None if it cannot be read."""
        path, offset = self._places[step, mode]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return decode_record(file.readline())
        except (OSError, *_DAMAGED_LINE_ERRORS):
            _warn_unreadable(path)
            return None


def read_run(path: str | Path) -> Run:
    """Return the records of a run, given its folder (`output_dir`) or the folder `rollouts` in it.

    Raises:
        DataError: it has no records, or they are of a later version.
    """
    folder = records_folder(Path(path))
    if not has_records(folder):
        raise DataError(
            f"{path} has no records: give the output_dir of a run of DAPOTrainer (TRL's own trainers write none) with "
            "rollout_log_steps above 0."
        )
    return Run(folder)


def records_folder(path: Path) -> Path:
    """Return the folder of a run's records, given the run's `output_dir` or that folder."""
    return path if path.name == FOLDER else path / FOLDER


def has_records(folder: Path) -> bool:
    """Whether anything was recorded or logged in this folder of records."""
    return (folder / LOGS_FILE).is_file() or any(folder.glob(RECORD_FILES))


def read_logs(path: Path) -> Iterator[LogEntry]:
    """Yield what the trainer logged, in the order in which it did; lines that cannot be read are left out.

    Raises:
        DataError: an entry is of a later version.
    """
    lines = path.open("rb") if path.is_file() else io.BytesIO()
    with lines:
        for line in filter(bytes.strip, lines):
            try:
                content = json.loads(line)
                values = {intern(name): value for name, value in content["values"].items()}
                entry, version = LogEntry(content["step"], content["mode"], content["time"], values), content["version"]
            except _DAMAGED_LINE_ERRORS:
                _warn_unreadable(path)
                continue
            _check_version(version, path)
            yield entry


def read_thumbnail(folder: Path, name: str) -> bytes | None:
    """Return a WebP file in the folder of thumbnails; None if it is missing, something else or elsewhere."""
    try:
        path = (folder / name).resolve()
        content = path.read_bytes() if path.parent == (folder / "images").resolve() else b""
    except (OSError, ValueError):
        return None
    return content if is_webp(content) else None


def is_webp(content: bytes) -> bool:
    """Whether a file is a WebP picture, by its head."""
    return content[:4] == b"RIFF" and content[8:12] == b"WEBP"


def refuse_unwritable(path: Path, option: str, is_folder: bool = False) -> None:
    """Raise `ConfigError` if a file (or folder) at `path`, which `option` names, could not be written."""
    if not is_writable(path / "file" if is_folder else path):
        raise ConfigError(f"{option} is {path}, which cannot be written to: choose another place.")


def _check_version(version: int, path: Path) -> None:
    if version > VERSION:
        raise DataError(
            f"{path} has version {version}, but this release of vgr_trl reads versions up to {VERSION}: install a "
            "later one."
        )


def _warn_unreadable(path: Path) -> None:
    logger.warning_once(f"{path} has lines that cannot be read; they are left out.")
