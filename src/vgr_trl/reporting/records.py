"""Write and read the records of rollouts in the folder `rollouts` of a run.

`records-000001.jsonl` has one line of JSON per recorded rollout batch, `logs.jsonl` one per log of the trainer,
`images` the thumbnails, `run.json` the options. Each line is appended by one call, so that a killed run loses at most
the last line. NaN and infinity are written as null.
"""

import base64
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from hashlib import sha1
from itertools import count
from pathlib import Path
from sys import intern
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from transformers.utils import logging

from vgr_trl.atomic_files import append_atomic, write_atomic
from vgr_trl.errors import ConfigError, DataError

logger = logging.get_logger(__name__)

VERSION = 1
FOLDER, RUN_FILE, LOGS_FILE, RECORD_FILES = "rollouts", "run.json", "logs.jsonl", "records-*.jsonl"
IDENTITY_FILE = "run.json"  # in `output_dir`: model, data and other settings that a resumed run must keep
Numbers = list[float | None]

_HEAD_PATTERN = re.compile(rb'\{"version":(\d{1,9}),"step":(\d{1,18}),"mode":"(train|eval)"')
_THUMBNAIL_PATTERN = re.compile(rb'"images/(\w+\.webp)"')
DAMAGED_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # raised by JSON of another shape
# Types of entries of `run.json`; other entries are shown as text.
_TYPES = {"version": int, "rewards": list[str], "options": dict, "changed": list[str] | None, "setup": dict[str, str]}
_PER_TOKEN = ("weights", "dependency", "vgr", "advantages", "entropies", "logps", "changes")  # fields of `Completion`
_MAX_FILES = 16  # number of record files that share `max_bytes`


@dataclass
class RecordedImage:
    """An image of a prompt or of a tool's answer.

    Attributes:
        file: thumbnail, relative to the folder of the records; None if there is none.
        width, height: size of the original image, in pixels.
        grid: rows and columns of its vision tokens; None if unknown.
        regions: boxes that the question is about (left, top, width, height in pixels); None without boxes in the data.
        perturbed: thumbnail of the perturbed image behind the dependency; None if it was not measured.
    """

    file: str | None
    width: int
    height: int
    grid: Sequence[int] | None = None
    regions: Sequence[Sequence[float]] | None = None
    perturbed: str | None = None


@dataclass
class AttentionMap:
    """Attention of T tokens over the V vision tokens in the prompt, quantised to one byte each.

    Attributes:
        scale: T numbers; token t attends to vision token v with scale[t] · byte / 255.
        values: T · V bytes, token by token.
    """

    scale: list[float]
    values: bytes

    def row(self, token: int) -> list[float]:
        """Return the attention of one token, V numbers in [0, 1] that sum to its attention mass on the images."""
        width = len(self.values) // len(self.scale)
        return [self.scale[token] * byte / 255 for byte in self.values[token * width : (token + 1) * width]]


@dataclass
class Turn:
    """A turn of a completion that may call tools.

    Attributes:
        start, stop: the policy wrote `Completion.tokens[start:stop]`.
        calls: calls of tools, as text: `zoom(box=[0, 0, 0.5, 1])`.
        answers: answers of tools, as text, with one `<image>` per image.
        images: number of images that the tools returned.
    """

    start: int
    stop: int
    calls: list[str]
    answers: list[str]
    images: int


@dataclass
class Completion:
    """A completion of T tokens with its measurements and rewards. Per-token lists have length T, or are None.

    Attributes:
        question: ID of prompt and images, the same at every step.
        group: index of the prompt in its rollout batch.
        prompt: text that the model read, with one `<image>` per image.
        text: without special tokens.
        tokens: T pieces of text, special tokens included, with one `<image>` per image of a tool.
        solution: reference answer as text, if the data have one.
        weights: token weights.
        dependency: visual dependency, in nats.
        vgr: vision gain ratio over the layers that rewards use.
        advantages: per token, as used by the loss; None if the completion was not trained on.
        entropies, logps: under the policy that generated the tokens, in nats.
        changes: change of the log-probability when the image is perturbed, in nats.
        signals: own signals of the run by name, per token.
        credit: weights of the credit rules by name, per token; a filter gives 0 and 1.
        rewards: unweighted rewards by name.
        reward: weighted sum of the rewards.
        advantage: advantage of the completion, before credit is assigned to tokens.
        correct: whether the accuracy reward is 1; None without an accuracy reward.
        metrics: attention quantities by segment of layers, then by name.
        images: images of the prompt, in order, then the images that tools returned.
        attention: attention over the vision tokens of all images, averaged over heads and the layers that rewards use.
        replaced: whether another group replaced the group of this completion, which was then not trained on.
        teacher: the token that the teacher finds most likely in place of each token; None without a teacher.
        teacher_images: images that the teacher sees.
        turns: turns of a run with tools; the policy wrote no token outside of them.
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
    signals: dict[str, Numbers] = field(default_factory=dict)
    credit: dict[str, Numbers] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    correct: bool | None = None
    metrics: dict[str, dict[str, float | None]] | None = None
    images: list[RecordedImage] = field(default_factory=list)
    attention: AttentionMap | None = None
    replaced: bool = False
    teacher: list[str] | None = None
    teacher_images: list[RecordedImage] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def written(self) -> list[int]:
        """Return the indices of the tokens that the policy wrote."""
        return [index for turn in self.turns for index in range(turn.start, turn.stop)] or [*range(len(self.tokens))]

    def per_token(self) -> dict[str, Numbers | None]:
        """Return all lists of T numbers by name; named signals are `signal/<name>`, credit rules `credit/<name>`."""
        columns = {name: vars(self)[name] for name in _PER_TOKEN}
        columns |= {f"signal/{name}": values for name, values in self.signals.items()}
        return columns | {f"credit/{name}": values for name, values in self.credit.items()}


@dataclass
class Record:
    """Completions of one rollout batch.

    Attributes:
        step: optimizer steps before the completions were generated.
        mode: `train` or `eval`.
        time: Unix time, in seconds.
        reward_weights: weights by reward name, from which `Completion.reward` was computed.
    """

    step: int
    mode: str
    time: float
    completions: list[Completion]
    reward_weights: dict[str, float] = field(default_factory=dict)


@dataclass
class LogEntry:
    """Values that the trainer logged at a step; None where a value is not finite."""

    step: int
    mode: str
    time: float
    values: dict[str, float | None]


def encode_entry(entry: Record | LogEntry) -> bytes:
    """Return an entry as a line of JSON that begins with version, step and mode."""
    return encode_json(to_json_value({"version": VERSION, **asdict(entry)})) + b"\n"


def encode_json(content: Any) -> bytes:
    """Return JSON without spaces, as UTF-8; a lone surrogate becomes a question mark."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types: floats to six digits, non-finite floats to None, bytes to base64."""
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
    """Parse a record from a line of JSON; unknown keys are ignored.

    Raises:
        TypeError, ValueError, RecursionError: the line was not written by `encode_entry`.
    """
    record: Record = parse_value(json.loads(line), Record)
    for completion in record.completions:
        _check_lengths(completion)
    return record


def _check_lengths(completion: Completion) -> None:
    """Raise `ValueError` for a number of values that differs from the number of tokens, or impossible shapes."""
    count, attention = len(completion.tokens), completion.attention
    per_token = [*completion.per_token().values(), completion.teacher, None if attention is None else attention.scale]
    fits = all(values is None or len(values) == count for values in per_token)
    fits &= attention is None or not count or len(attention.values) % count == 0
    for image in completion.images:
        fits &= len(image.grid or (1, 1)) == 2 and all(len(box) == 4 for box in image.regions or ())
    if not (fits and all(0 <= turn.start <= turn.stop <= count for turn in completion.turns)):
        raise ValueError("values per token, shapes or turns do not fit the tokens")


def parse_value(value: Any, kind: Any) -> Any:
    """Return a JSON value as the type of an annotation; raise `TypeError` or `ValueError` for another type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else parse_value(value, parts[0])
    if origin is dict and isinstance(value, dict):
        return {name: parse_value(item, parts[1]) for name, item in value.items()}
    if origin in (list, Sequence) and isinstance(value, list):
        by_type = {type(item): item for item in value}  # checks one number of each type, not thousands
        nested = list in by_type or dict in by_type
        parsed = [parse_value(item, parts[0]) for item in (value if nested else by_type.values())]
        return parsed if nested else value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{name: parse_value(value[name], hint) for name, hint in hints.items() if name in value})
    if kind is bytes:
        return base64.b64decode(value)
    if kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{type(value).__name__} instead of {kind}")


class RecordWriter:
    """Write the records of a run, up to a maximum size.

    Above the maximum, the oldest record file and its thumbnails are deleted, except for the first file, which shows
    the start of the run.

    Args:
        description: content of `run.json` besides version and time.
        max_bytes: maximum size of records and thumbnails together.
        resumed: whether the run is resumed; otherwise existing records are moved to `rollouts.1`.
    """

    def __init__(self, output_dir: Path, description: Mapping[str, Any], max_bytes: int, resumed: bool) -> None:
        self.folder, self.max_bytes = output_dir / FOLDER, max_bytes
        if self.folder.exists() and not resumed:
            number = next(number for number in count(1) if not (output_dir / f"{FOLDER}.{number}").exists())
            self.folder.rename(self.folder.with_suffix(f".{number}"))
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        created = read_object(self.folder / RUN_FILE).get("created", now)
        text = json.dumps({"version": VERSION, "created": created, **description}, indent=2, default=str)
        write_atomic(self.folder / RUN_FILE, text.encode(), sync=False)
        if (logs := self.folder / LOGS_FILE).exists() and not logs.read_bytes().endswith(b"\n"):
            append_atomic(logs, b"\n")  # end a line that a killed run truncated
        self._file, self._size = self._new_file(), self._count_bytes()

    def add(self, record: Record, thumbnails: Mapping[str, bytes]) -> None:
        """Append a record, and write its thumbnails `images/….webp` unless they exist."""
        for name, content in thumbnails.items():
            if not (self.folder / name).exists():
                write_atomic(self.folder / name, content, sync=False)
                self._size += len(content)
        line = encode_entry(record)
        if self._file.exists() and self._file.stat().st_size + len(line) > self.max_bytes // _MAX_FILES:
            self._file = self._new_file()
        append_atomic(self._file, line)
        self._size += len(line)
        while self._size > self.max_bytes and len(files := sorted(self.folder.glob(RECORD_FILES))) > 2:
            files.pop(1).unlink()
            named = {name for file in files for name in _THUMBNAIL_PATTERN.findall(file.read_bytes())}
            for image in (self.folder / "images").iterdir():
                if image.name.encode() not in named:
                    image.unlink()
            self._size = self._count_bytes()

    def log(self, entry: LogEntry) -> None:
        """Append a log of the trainer."""
        append_atomic(self.folder / LOGS_FILE, encode_entry(entry))

    def _new_file(self) -> Path:
        """Return the next file name; a resumed run also starts a new file, since the last line may be truncated."""
        numbers = [int(path.stem.removeprefix("records-")) for path in self.folder.glob(RECORD_FILES)]
        return self.folder / f"records-{max(numbers, default=0) + 1:06d}.jsonl"

    def _count_bytes(self) -> int:
        paths = *self.folder.glob(RECORD_FILES), *(self.folder / "images").iterdir()
        return sum(path.stat().st_size for path in paths)


class Run:
    """Read the records of a run, one at a time.

    Attributes:
        folder: folder of the records.
        description: content of `run.json`: name, created, rewards, model, options; empty if unreadable.
        name: name of the run; by default the name of its folder.
        rewards: reward names, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.description = folder, dict[str, Any]()
        for name, value in read_object(folder / RUN_FILE).items():
            with suppress(TypeError):
                self.description[name] = parse_value(value, _TYPES.get(name, Any))
        _check_version(self.description.get("version", 1), folder / RUN_FILE)
        self.name = str(self.description.get("name") or folder.resolve().parent.name)
        self.rewards: list[str] = self.description.get("rewards", [])
        self._offsets: dict[tuple[int, str], tuple[Path, int]] = {}
        for path in sorted(folder.glob(RECORD_FILES)):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    if (head := _HEAD_PATTERN.match(line)) and line.endswith(b"}\n"):
                        _check_version(int(head[1]), path)
                        self._offsets[int(head[2]), head[3].decode()] = path, offset
                    else:
                        _warn_unreadable(path)
                    offset += len(line)

    def steps(self, mode: str | None = None) -> list[tuple[int, str]]:
        """Return (step, mode) of each record in order, optionally of one mode."""
        return sorted(key for key in self._offsets if mode in (None, key[1]))

    def records(self, mode: str | None = None) -> Iterator[Record]:
        """Yield the records in the order of their steps; of a step that was run twice, the last one."""
        for key in self.steps(mode):
            if (record := self.record(*key)) is not None:
                yield record

    def record(self, step: int, mode: str) -> Record | None:
        """Return the record of a step listed by `steps`, or None if it cannot be read."""
        path, offset = self._offsets[step, mode]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return decode_record(file.readline())
        except (OSError, *DAMAGED_ERRORS):
            _warn_unreadable(path)
            return None


def read_run(path: str | Path) -> Run:
    """Open the records of a run, given its `output_dir` or the folder `rollouts` in it.

    Raises:
        DataError: there are no records, or a later release wrote them.
    """
    path = Path(path)
    folder = records_folder(path)
    if not (folder / LOGS_FILE).is_file() and not any(folder.glob(RECORD_FILES)):
        problem = "has no records" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}: give the output_dir of a run with rollout_log_steps above 0.")
    return Run(folder)


def find_identity(model: Path) -> Path | None:
    """Read the `IDENTITY_FILE` of a model's run; the model folder is its `output_dir`, or inside it."""
    files = [folder / IDENTITY_FILE for folder in (model, model.absolute().parent) if model.is_dir()]
    return next(filter(Path.is_file, files), None)


def records_folder(path: Path) -> Path:
    """Return the folder of records, given a run's `output_dir` or that folder itself."""
    return path if path.name == FOLDER else path / FOLDER


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, *DAMAGED_ERRORS):
        return {}
    return content if isinstance(content, dict) else {}


def read_logs(path: Path) -> Iterator[LogEntry]:
    """Yield the logs of the trainer in order; unreadable lines are skipped with a warning.

    Raises:
        DataError: a later release wrote an entry.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                content = json.loads(line)
                entry, version = parse_value(content, LogEntry), int(content["version"])
                entry.values = {intern(name): value for name, value in entry.values.items()}
            except DAMAGED_ERRORS:
                _warn_unreadable(path)
                continue
            _check_version(version, path)
            yield entry


def read_thumbnail(folder: Path, name: str) -> bytes | None:
    """Return a thumbnail; None if it is missing, not a WebP file or outside of the folder `images`."""
    try:
        path = (folder / name).resolve()
        content = path.read_bytes() if path.parent == (folder / "images").resolve() else b""
    except (OSError, ValueError):
        return None
    return content if is_webp(content) else None


def is_webp(content: bytes) -> bool:
    """Whether the content of a file begins like a WebP image."""
    return content[:4] == b"RIFF" and content[8:12] == b"WEBP"


def question_id(prompt: str, images: Sequence[str | None]) -> str:
    """Return an ID of a prompt and the thumbnails of its images: 16 hexadecimal digits."""
    return sha1(f"{prompt} {images}".encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:16]


def refuse_unwritable(path: Path, option: str, is_folder: bool = False, mark: bytes | None = None) -> None:
    """Check that an option names a writable path.

    Args:
        path: value of the option.
        option: name of the option, for the message.
        is_folder: whether files are written to the folder `path`.
        mark: bytes near the beginning or end of every file that this command writes, so that it replaces no other
            file, link or device; None: the file is appended to.

    Raises:
        ConfigError: the path cannot be written, or something else would be replaced.
    """
    file = path / "file" if is_folder else path
    folder = next(folder for folder in file.absolute().parents if folder.exists())  # others are made later
    if file.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"{option} is {path}, which cannot be written to: choose another path.")
    if mark is not None and (path.is_symlink() or (path.exists() and not (path.is_file() and _has_mark(path, mark)))):
        raise ConfigError(f"{option} is {path}, which is no file that this command has written: choose another path.")


def _has_mark(path: Path, mark: bytes) -> bool:
    """Return whether a file is empty or has a mark within 64 KB of its beginning or end."""
    with path.open("rb") as file:
        ends = [os.pread(file.fileno(), 2**16, place) for place in (0, max(path.stat().st_size - 2**16, 0))]
        return not ends[0] or any(mark in end for end in ends)


def _check_version(version: int, path: Path) -> None:
    if version > VERSION:
        raise DataError(f"{path} has version {version}, but this vgr_trl reads up to {VERSION}: install a later one.")


def _warn_unreadable(path: Path) -> None:
    logger.warning_once(f"{path} has unreadable lines; they are skipped.")
