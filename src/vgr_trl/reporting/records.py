"""Records of rollouts in the folder of a run: what one holds, how it is written, and how it is read again."""

import base64
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from pathlib import Path
from statistics import mean
from typing import Any, BinaryIO, NamedTuple

from vgr_trl.utils import ConfigError, DataError, append_whole, disk_full_named, unfinished, write_whole

# ---------------------------------------------------------------------------------------------------------------------
# The names that verl, EasyR1 and MTRL have for metrics of ours.


VERL: dict[str, tuple[str, ...]] = {
    "policy_loss": ("actor/pg_loss",),
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "entropy": ("actor/entropy",),
    "approx_kl": ("actor/approx_kl",),
    "clip_ratio/region_mean": ("actor/clipfrac", "actor/pg_clipfrac"),
    "kl": ("actor/kl_loss",),
    "kl/mean": ("actor/kl_loss",),
    "kl/completion": ("actor/kl_penalty",),
    "kl/coefficient": ("actor/kl_coef",),
    "critic/value_loss": ("critic/vf_loss",),
    "critic/explained_variance": ("critic/vf_explained_var",),
    "critic/learning_rate": ("critic/lr",),
    "reward": ("critic/rewards/mean", "reward/overall"),
    "completions/mean_length": ("response_length/mean",),
    "completions/min_length": ("response_length/min",),
    "completions/max_length": ("response_length/max",),
    "completions/clipped_ratio": ("response_length/clip_ratio",),
    "step_time": ("perf/time_per_step", "timing_s/step"),
    "timing/generation": ("timing_s/gen",),
    "timing/reward": ("timing_s/reward",),
    "timing/old_logps": ("timing_s/old",),
    "timing/reference": ("timing_s/ref",),
    "timing/perceive": ("timing_s/aug",),
    "timing/choose": ("timing_s/adv",),
    "timing/values": ("timing_s/values",),
    "eval_reward": ("val/reward_score",),
    **{
        name: (f"actor/{name}",)
        for name in (
            "entropy_token_fraction", "perception_token_fraction", "combined_token_fraction", "sensitivity_score_mean",
            "scaling_factor_mean", "dynamic_scaling_max", "low_var_kl_mean_selected", "low_var_kl_mean_rejected",
            "low_var_kl_threshold", "entropy_mean_selected", "entropy_mean_rejected", "entropy_threshold",
        )
    },
}  # fmt: skip
_UPDATE = ("timing/update", "timing/optimizer")


def in_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return what is logged under the names of verl; metrics that it has no name for keep theirs.

    `actor/pg_loss` is the whole loss where TRL logs no part of it; `perf/throughput` tokens per second and process;
    `timing_s/update_actor` passes and optimizer together.

    Args:
        processes: of the run.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        for other in _names(name):
            if other == name or other not in logs:
                found[other] = value
    if "loss" in logs:
        found.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        found["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [found.pop(name) for name in _UPDATE if name in found]:
        found["timing_s/update_actor"] = sum(seconds)
    return found


def _names(name: str) -> tuple[str, ...]:
    if name in VERL:
        return VERL[name]
    evaluated = name.startswith("eval_")
    plain = name.removeprefix("eval_")
    if plain.startswith("rewards/") and plain.endswith("/mean"):
        reward = plain.removeprefix("rewards/").removesuffix("/mean")
        return (f"val/{reward}_reward" if evaluated else f"reward/{reward}",)
    if evaluated and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if evaluated and plain.startswith("completions/") and plain in VERL:
        return tuple(f"val_{other}" for other in VERL[plain])
    return (name,)


# ---------------------------------------------------------------------------------------------------------------------
# What a record of a rollout holds; a value that is not finite is None.


MODES = ("train", "eval")
Numbers = list[float | None]


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
    grid: tuple[int, int] | None = None
    regions: list[tuple[float, float, float, float]] | None = None
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
    """A completion of T tokens with what was measured and earned; lists of tokens are of length T, or None.

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


# ---------------------------------------------------------------------------------------------------------------------
# Rollout records as lines of JSON, which has no NaN and no infinity: both are null.


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


# ---------------------------------------------------------------------------------------------------------------------
# What a trainer logs, a line per log, in a file of bounded size.


_EVALUATION = b'"mode":"eval"'  # in the head of a line, which `encode_log` writes first
_HEAD = 100  # bytes


class LogFile:
    """Log entries, appended one by one, each by one call, so that a kill costs at most the last.

    Where the file gets larger than its bound, every second entry of training goes, all evaluations stay; where these
    alone are too many, every second entry of any kind. So the oldest entries become the sparsest, and the first and the
    newest are there.

    Args:
        path: of the file; what a kill has cut of its last line is ended.
        max_bytes: its bound.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        _end_last_line(path)
        self._size = path.stat().st_size if path.is_file() else 0

    def add(self, entry: LogEntry) -> None:
        """Append an entry."""
        line = encode_log(entry).encode("utf-8") + b"\n"
        for droppable in (_is_of_training, _is_any):
            if self._size + len(line) > self.max_bytes and self._size:
                self._thin(droppable)
        append_whole(self.path, line)
        self._size += len(line)

    def _thin(self, droppable: Callable[[bytes], bool]) -> None:
        new = unfinished(self.path)
        try:
            with disk_full_named(self.path), self.path.open("rb") as old, new.open("wb") as file:
                file.writelines(_without_every_second(old, droppable))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)
        self._size = self.path.stat().st_size


def _without_every_second(lines: Iterable[bytes], droppable: Callable[[bytes], bool]) -> Iterator[bytes]:
    keep = False
    for line in lines:
        if droppable(line):
            keep = not keep
        if keep or not droppable(line):
            yield line


def _is_of_training(line: bytes) -> bool:
    return _EVALUATION not in line[:_HEAD]


def _is_any(line: bytes) -> bool:
    return True


def _end_last_line(path: Path) -> None:
    """A line that a kill has cut must not swallow the next one."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# Tokens as the pieces of text that they stand for.


Decode = Callable[[list[int]], str]  # keeps special tokens, does not clean up

_UNFINISHED = "\ufffd"  # what the first bytes of a character decode to


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return a piece of text for each token; together they are the text of all tokens.

    A character whose bytes are spread over several tokens belongs to the last of them; the others are empty. So are
    bytes that are no text: those of several tokens in a row belong to the token behind them, or to the last. Each
    token is decoded behind the one before it, because some tokenizers drop the space at the start of a text.
    """
    alone = [decode([token]) for token in ids]
    if "".join(alone) == decode(list(ids)):
        return alone
    pieces: list[str] = []
    before = start = 0  # tokens from `start` on belong to a character that is not finished
    for end in range(1, len(ids) + 1):
        context = decode(list(ids[before:start]))
        text = decode(list(ids[before:end]))
        waiting = text.endswith(_UNFINISHED) and end < len(ids)
        if waiting or not text.startswith(context):
            pieces.append("" if waiting else alone[end - 1])
        else:
            pieces.append(text[len(context) :])
        if not waiting:
            before, start = start, end
    return pieces


def prompt_text(ids: Sequence[int], vision_token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of a prompt, with `<image>` for each run of vision tokens."""
    vision = set(vision_token_ids)
    parts = []
    for is_vision, run in groupby(ids, key=lambda token: token in vision):
        parts.append("<image>" if is_vision else decode(list(run)))
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The records of a run, read from its folder with bounded memory.


FOLDER, RUN_FILE, LOGS_FILE = "rollouts", "run.json", "logs.jsonl"
RECORDS = "records-{:06d}.jsonl"
LONGEST_LINE = 256 * 2**20  # of a record that is read, in bytes; a damaged file may be one line of many gigabytes

_RECORDED_RUN_HEAD = re.compile(rb'\{"version":(\d{1,9}),"step":(\d{1,18}),"mode":"(train|eval)"')


@dataclass
class Run:
    """The records of a run; nothing but what identifies a record is kept in memory.

    Attributes:
        folder: of the records.
        description: content of `run.json`: name, created, rewards, model, options; empty if it is missing.
        damaged: records and log entries that could not be read, so far: torn, too long or no records.
    """

    folder: Path
    description: dict[str, Any]
    damaged: int = 0
    _found: dict[tuple[int, str], tuple[Path, int]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Of the run, by default that of its folder."""
        return str(self.description.get("name") or self.folder.resolve().parent.name)

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards, in order."""
        names = self.description.get("rewards")
        return [str(name) for name in names] if isinstance(names, list) else []

    def steps(self, mode: str | None = None) -> list[tuple[int, str]]:
        """Return step and mode of the records, in order; of one mode if given."""
        return sorted(key for key in self._found if mode in (None, key[1]))

    def records(self, mode: str | None = None) -> Iterator[Record]:
        """Read the records one by one, in the order of their steps; of a step that was run twice, the last.

        Raises:
            DataError: a record is of a later version.
        """
        for key in self.steps(mode):
            if (record := self.record(*key)) is not None:
                yield record

    def record(self, step: int, mode: str) -> Record | None:
        """Return the record of a step; None if there is none, or it is damaged."""
        if (step, mode) not in self._found:
            return None
        path, offset = self._found[step, mode]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                line = file.readline(LONGEST_LINE)
            return decode_record(line.decode("utf-8"))
        except (OSError, UnicodeDecodeError, DataError):
            self.damaged += 1
            return None

    def logs(self) -> list[LogEntry]:
        """Return what the trainer logged, in the order of steps; of a value logged twice at a step, the last.

        Raises:
            DataError: an entry is of a later version.
        """
        merged: dict[tuple[int, str], LogEntry] = {}
        path = self.folder / LOGS_FILE
        if not path.is_file():
            return []
        with path.open("rb") as file:
            for entry in decoded_logs((line for line, _ in self._lines(file)), path):
                if entry is None:
                    self.damaged += 1
                    continue
                before = merged.get((entry.step, entry.mode))
                if before is not None:
                    entry.values = before.values | entry.values
                merged[entry.step, entry.mode] = entry
        return [merged[key] for key in sorted(merged)]

    def index(self) -> None:
        """Find the records in the files, without keeping any."""
        self._found.clear()
        for path in sorted(self.folder.glob(RECORDS.format(0).replace("000000", "*"))):
            with path.open("rb") as file:
                for line, offset in self._lines(file):
                    key = _check_head(line, path)
                    if key is None:
                        self.damaged += 1
                    else:
                        self._found[key] = path, offset

    def _lines(self, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """The whole lines of a file with their offsets; a line that was not written to its end is passed over."""
        offset = 0
        while line := file.readline(LONGEST_LINE):
            start, offset = offset, offset + len(line)
            if not line.endswith(b"\n"):
                self.damaged += 1
                while line and not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(LONGEST_LINE)
                    offset += len(line)
            elif line.strip():
                yield line, start


def read_run(path: str | Path) -> Run:
    """Return the records of a run, given its folder (`output_dir`) or the folder `rollouts` in it.

    Raises:
        DataError: there is no such folder, it has no records, or they are of a later version.
    """
    given = Path(path)
    if not given.is_dir():
        raise DataError(f"{given} is no folder: give the output_dir of a run.")
    folder = given if given.name == FOLDER else given / FOLDER
    if not folder.is_dir():
        raise DataError(f"{given} has no folder {FOLDER}: give the output_dir of a run with rollout_log_steps above 0.")
    try:
        run = Run(folder, _description(folder / RUN_FILE))
        run.index()
    except OSError as error:
        raise DataError(
            f"The records in {folder} cannot be read ({error}): check the folder and its rights."
        ) from error
    if not run.steps() and not (folder / LOGS_FILE).is_file():
        raise DataError(f"{folder} has no records yet: wait for the first step that is recorded, or give another run.")
    return run


def decoded_logs(lines: Iterable[bytes], path: Path) -> Iterator[LogEntry | None]:
    """Yield the log entry in each line of a file, None for one that is damaged.

    Raises:
        DataError: an entry is of a later version.
    """
    for line in lines:
        _check_head(line, path)
        try:
            yield decode_log(line.decode("utf-8"))
        except (UnicodeDecodeError, DataError):
            yield None


def _description(path: Path) -> dict[str, Any]:
    """A run killed at its very start has none, or half of one; its records say the rest."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(loaded, dict):
        return {}
    check_version(loaded.get("version"), str(path))
    return loaded


def _check_head(line: bytes, path: Path) -> tuple[int, str] | None:
    """Step and mode of a line, None if it is damaged.

    Raises:
        DataError: it is of a later version.
    """
    if (found := _RECORDED_RUN_HEAD.match(line)) is not None:
        check_version(int(found[1]), str(path))
        return int(found[2]), found[3].decode()
    try:
        loaded = json.loads(line)
        version, step, mode = loaded["version"], loaded["step"], loaded["mode"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(version, int) or not isinstance(step, int) or mode not in MODES:
        return None
    check_version(version, str(path))
    return step, mode


# ---------------------------------------------------------------------------------------------------------------------
# Records written into the folder of a run, in a form that survives a kill, of bounded size.


_IMAGE = re.compile(rb'"images/([0-9a-f]{40}\.webp)"')
_FILES = 16  # into which the records are cut: one at a time is removed where they get too large


class RecordFiles:
    """The records of a run in its folder.

    A record is a line, appended by one call, so a kill costs at most the last one. Records of an earlier process stay
    and a new file is begun. Beyond the bound the oldest file is removed with the thumbnails that only it shows, except
    the first file, which shows how the run began. What the trainer logs has the same bound, by itself (`LogFile`).

    Args:
        description: content of `run.json` besides version and time.
        max_bytes: bound of records and thumbnails together, and of the log.
        resumed: whether the run goes on; else records that are already there are moved aside.
    """

    def __init__(self, output_dir: Path, description: Mapping[str, Any], max_bytes: int, resumed: bool) -> None:
        self.folder = output_dir / FOLDER
        self.max_bytes, self.file_bytes = max_bytes, max_bytes // _FILES
        if self.folder.exists() and not resumed:
            self.folder.rename(_free_name(self.folder))
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        paths = sorted(self.folder.glob("records-*.jsonl"))
        self._images: dict[Path, set[str]] = {path: _image_names(path) for path in paths}  # that a file shows
        self._sizes = {path: path.stat().st_size for path in [*paths, *(self.folder / "images").iterdir()]}
        self._current: Path | None = None
        self._log = LogFile(self.folder / LOGS_FILE, max_bytes)
        self._describe(description)

    def add(self, record: Record, thumbnails: Mapping[str, bytes]) -> None:
        """Append a record, with the files `images/….webp` that it names and that are not there yet."""
        for name, content in thumbnails.items():
            if self.folder / name not in self._sizes:
                write_whole(self.folder / name, content, sync=False)
                self._sizes[self.folder / name] = len(content)
        line = encode_record(record).encode("utf-8") + b"\n"
        path = self._file_for(len(line))
        self._current = None  # what a failure leaves of a line is the last of its file
        append_whole(path, line)
        self._current = path
        self._sizes[path] = self._sizes.get(path, 0) + len(line)
        self._images.setdefault(path, set()).update(name.removeprefix("images/") for name in thumbnails)
        self._remove_oldest()

    def log(self, entry: LogEntry) -> None:
        """Append what the trainer has logged."""
        self._log.add(entry)

    def _file_for(self, size: int) -> Path:
        current = self._current
        if current is not None and self._sizes[current] + size <= self.file_bytes:
            return current
        numbers = [int(path.stem.removeprefix("records-")) for path in self.folder.glob("records-*.jsonl")]
        return self.folder / RECORDS.format(max(numbers, default=0) + 1)

    def _remove_oldest(self) -> None:
        while sum(self._sizes.values()) > self.max_bytes and len(paths := sorted(self._images)) > 2:
            oldest = paths[1]
            others = set().union(*(names for path, names in self._images.items() if path != oldest))
            gone = [oldest, *(self.folder / "images" / name for name in self._images.pop(oldest) - others)]
            for path in gone:
                path.unlink(missing_ok=True)
                self._sizes.pop(path, None)

    def _describe(self, description: Mapping[str, Any]) -> None:
        path = self.folder / RUN_FILE
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if path.is_file():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                created = json.loads(path.read_text(encoding="utf-8"))["created"]
        content = {"version": VERSION, "created": created, **description}
        write_whole(path, json.dumps(content, indent=2, default=str).encode("utf-8"), sync=False)


def refuse_unwritable(path: Path, option: str, is_folder: bool = False) -> None:
    """Raise `ConfigError` if a file (or folder) at `path`, which `option` names, could not be written."""
    for existing in (path, *path.absolute().parents):
        if existing.exists():
            wants_folder = is_folder or existing != path
            if existing.is_dir() != wants_folder or not os.access(existing, os.W_OK):
                raise ConfigError(f"{option} is {path}, but {existing} cannot be written to: choose another place.")
            return


def _image_names(path: Path) -> set[str]:
    names: set[str] = set()
    with path.open("rb") as file:
        for line in file:
            names.update(name.decode() for name in _IMAGE.findall(line))
    return names


def _free_name(folder: Path) -> Path:
    number = 1
    while (free := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return free


# ---------------------------------------------------------------------------------------------------------------------
# Signs that a run is collapsing, in the courses of what it logs: watched for in training, shown by the report.


WINDOW = 8  # steps whose mean is compared with the means of earlier ones

_WATCHED = {"completions/mean_length", "completions/clipped_ratio", "entropy", "frac_reward_zero_std"}
_SMALLEST_RATE = 0.1  # of right or well-formed answers, below which a fall says nothing


class Sign(NamedTuple):
    """What was seen, and what may help; `kind` is the same for the same sign at another step."""

    kind: str
    seen: str
    remedies: tuple[str, ...]


class Course:
    """One metric: the mean of its newest `WINDOW` steps, and the first, lowest and highest such mean before them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self.first: float | None = None
        self.lowest = self.highest = self.now = 0.0

    def add(self, value: float) -> None:
        """Take in the value of one more step."""
        self._values.append(value)
        if len(self._values) < 2 * WINDOW:
            return
        before = mean(islice(self._values, WINDOW))
        self.now = mean(islice(self._values, WINDOW, None))
        if self.first is None:
            self.first = self.lowest = self.highest = before
        self.lowest, self.highest = min(self.lowest, before), max(self.highest, before)


def find_signs(courses: Mapping[str, Course], reward_weights: Mapping[str, float]) -> list[Sign]:
    """Return the signs of collapse in the courses of metrics, by TRL's names for them.

    Args:
        courses: of `rewards/<name>/mean` and `/std`, `completions/mean_length` and `/clipped_ratio`, `entropy`,
            `frac_reward_zero_std`; those of fewer than 2 · `WINDOW` steps are passed over.
        reward_weights: by the names of the reward functions.
    """
    known = {name: course for name, course in courses.items() if course.first is not None}
    signs = [*_rewards_fallen(known, reward_weights), *_length(known), *_entropy(known)]
    dead = known.get("frac_reward_zero_std")
    if dead is not None and dead.now >= 0.95 and dead.lowest < 0.8:
        signs.append(
            Sign(
                "equal rewards",
                f"{dead.now:.0%} of the groups have equal rewards (at least {dead.lowest:.0%} before)",
                ("other questions", "a reward that tells the completions of a prompt apart"),
            )
        )
    return signs


def _rewards_fallen(known: Mapping[str, Course], weights: Mapping[str, float]) -> list[Sign]:
    signs = []
    for name, weight in weights.items():
        course = known.get(f"rewards/{name}/mean")
        if course is None or weight == 0 or course.now >= course.highest / 2:
            continue
        if ("accuracy" in name or "format" in name) and course.highest >= _SMALLEST_RATE:
            rival = ", ".join(other for other in weights if "vgr" in other and weights[other])
            signs.append(_fall(name, course, "a lower learning_rate", *([f"less weight on {rival}"] if rival else [])))
        elif "vgr" in name and (share := _share(known, weights, name)) > 0.5:
            sign = _fall(name, course, f"less weight on {name}", "scale_rewards none")
            signs.append(
                Sign(sign.kind, f"{sign.seen} while it is {share:.0%} of the rewards' deviation", sign.remedies)
            )
    return signs


def _share(known: Mapping[str, Course], weights: Mapping[str, float], name: str) -> float:
    """Share of a reward's deviation, times its weight, in that of all."""
    spread = {
        other: abs(weight) * known[f"rewards/{other}/std"].now
        for other, weight in weights.items()
        if f"rewards/{other}/std" in known
    }
    return spread.get(name, 0.0) / (sum(spread.values()) or 1.0)


def _length(known: Mapping[str, Course]) -> list[Sign]:
    signs = []
    length, clipped = known.get("completions/mean_length"), known.get("completions/clipped_ratio")
    if length is not None and length.now < length.highest / 4:
        signs.append(_fall("the length of completions", length, "a lower learning_rate"))
    if clipped is not None and clipped.now > 0.9 and clipped.lowest < 0.5:
        signs.append(
            Sign(
                "clipped",
                f"{clipped.now:.0%} of the completions never end (at least {clipped.lowest:.0%} before)",
                ("a lower learning_rate", "a length reward"),
            )
        )
    return signs


def _entropy(known: Mapping[str, Course]) -> list[Sign]:
    course = known.get("entropy")
    if course is None or course.first is None:
        return []
    if course.now < 0.005 and course.highest > 0.05:
        return [_fall("entropy", course, "a lower learning_rate", "a higher epsilon_high or temperature")]
    if course.now > max(4 * course.lowest, 2 * course.first, 0.05):
        seen = f"entropy rose from {course.lowest:.3g} to {course.now:.3g}"
        return [Sign("entropy rose", seen, ("a lower learning_rate", "use_entropy_penalty"))]
    return []


def _fall(what: str, course: Course, *remedies: str) -> Sign:
    return Sign(what, f"{what} fell from {course.highest:.3g} to {course.now:.3g}", remedies)


def describe(signs: Sequence[Sign], step: int) -> str:
    """Return the one sentence of the warning."""
    remedies = ", or ".join(dict.fromkeys(remedy for sign in signs for remedy in sign.remedies))
    return (
        f"The run shows signs of collapse at step {step}: {', '.join(sign.seen for sign in signs)} (means of {WINDOW} "
        f"steps); go back to a checkpoint before step {max(step - 2 * WINDOW, 0)} and try {remedies}."
    )


def first_signs(entries: Iterable[LogEntry]) -> list[tuple[int, str]]:
    """Return the signs of collapse in what a run has logged in training, each with the step at which it is first seen.

    Beside those of `find_signs`, with logged values in the place of steps: a loss or gradient that is not finite.

    Args:
        entries: in the order of their steps; weights of rewards are those that were logged, else 1.
    """
    courses: dict[str, Course] = {}
    weights: dict[str, float] = {}
    found: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.mode != "train":
            continue
        for name, value in entry.values.items():
            if name in ("loss", "grad_norm") and (value is None or not math.isfinite(value)):
                found.setdefault(name, (entry.step, f"{name} is not finite"))
            if value is None or not math.isfinite(value):
                continue
            if name in _WATCHED or name.startswith("rewards/"):
                courses.setdefault(name, Course()).add(value)
                if name.startswith("rewards/"):
                    weights.setdefault(name.split("/")[1], 1.0)
            elif name.startswith("reward_weights/"):
                weights[name.removeprefix("reward_weights/")] = value
        for sign in find_signs(courses, weights):
            found.setdefault(sign.kind, (entry.step, sign.seen))
    return sorted(found.values())
