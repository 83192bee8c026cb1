"""Check every row at the start, in several processes and cached, and decode its images when it is used."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from weakref import WeakSet

import PIL
import pyarrow
from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, Json, List, Value, concatenate_datasets, config
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from datasets.utils import tqdm
from pyarrow import compute
from transformers.utils import logging
from xxhash import xxh3_128_digest

from vgr_trl.atomic_files import write_atomic
from vgr_trl.data.images import (
    BASE64_IMAGE,
    FOLDER,
    FULL_IMAGES,
    MEDIA,
    PLACE,
    TEACHER_IMAGES,
    ImageLimits,
    boxes_of,
    folder_of,
    frames_of,
    image_size,
    images_of,
    listed,
    open_image,
    videos_of,
)
from vgr_trl.data.load import lift_nested
from vgr_trl.data.prompts import SIZES, SYSTEM_PROMPT, PromptLengths, PromptTemplate, placed, refuse_special_tokens
from vgr_trl.data.read_row import (
    DIALOGUES,
    KEYS,
    UNREADABLE,
    Keys,
    image_column,
    image_columns,
    known_names,
    read_row,
    reason_of,
    renamed_row,
    require_columns,
    undecoded,
)
from vgr_trl.errors import ConfigError, DataError, error_text
from vgr_trl.processes import exit_with_parent

logger = logging.get_logger(__name__)

REASON = "__reason__"  # column: why a row cannot be used
REPLACED = "__replaced__"  # key of a row that replaces a damaged row
OWN_COLUMNS = (*MEDIA, *DIALOGUES, PLACE, FOLDER, UNREADABLE, REASON, SIZES)
EXAMINED = Features(
    {"prompt": Json(), "choices": List(Value("string")), "solution": Json(), REASON: Value("string")}
    | {SIZES: List(List(Value("int32")))}
)
LARGEST_SHARE = 0.1  # accepted share of rows whose answer cannot be read
DECODING_THREADS = min(8, os.cpu_count() or 1)
MAX_DAMAGED = 100  # consecutive rows; beyond it, a disk is probably missing
PREPARED_STREAMS = WeakSet[IterableDataset]()
SHUFFLE_BUFFER = 1000  # rows of a stream that wait, their images undecoded


@dataclass(frozen=True)
class RowOptions:
    """Requirements of a training row.

    Attributes:
        root: folder that relative paths of images and videos start from.
        needs_solution: whether a row must have an answer, as an accuracy reward is on.
        system_prompt: put before a `problem`; rows with a `prompt` of their own keep it.
        video_fps: frames of a video per second, above 0.
        max_video_frames: largest number of frames of a row; rows with more are skipped.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.
        images: limits to which images are resized.
        boxes: whether the run reads boxes, so that rows with one image and a bad box are skipped.
        context: column with a text for a teacher, so that rows with a bad one are skipped; "": no teacher reads one.
        decodes: whether to decode every image during the check, to find damage that headers do not show.
        full_images: whether rows also get their images without the limits, in the column `full_images`.
    """

    root: Path = Path()
    needs_solution: bool = True
    system_prompt: str | PromptTemplate | None = SYSTEM_PROMPT
    video_fps: float = 2.0
    max_video_frames: int = 16
    special: re.Pattern[str] | None = None
    images: ImageLimits = field(default_factory=ImageLimits)
    boxes: bool = False
    context: str = ""
    decodes: bool = False
    full_images: bool = False


def examine_row(row: Mapping[str, Any], options: RowOptions) -> dict[str, Any]:
    """Return the prompt, choices, solution and image sizes of a row, or the `REASON` why it cannot be used.

    Videos are decoded to count their frames. The key `right` has the resolved solution, None where none is needed.

    Args:
        row: row of the data.
        options: requirements.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    examined: dict[str, Any] = dict.fromkeys((*EXAMINED, "right"))
    try:
        question = read_row(row, needs_answer=options.needs_solution)
        prompt = placed(question.conversation(options.system_prompt))
        refuse_special_tokens(options.special, question.conversation(None), row.get(options.context))
        if options.decodes:
            sizes = [image.size for image in decoded_images(row, options)]
        else:
            found_sizes = [image_size(value, folder_of(row, options.root)) for value in images_of(row)]
            found_sizes += [frame.size for frame in _frames(row, options)]
            sizes = [options.images.size_of(*size) for size in found_sizes]
        if options.boxes and len(sizes) == 1:
            boxes_of(row, sizes[0], "it")
    except DataError as error:
        return examined | {REASON: reason_of(error)}
    answer = {"choices": question.choices, "solution": question.answer, "right": question.right}
    return examined | {"prompt": prompt, SIZES: sizes} | answer


def ready_row(row: Mapping[str, Any], options: RowOptions, column: str = "images") -> dict[str, Any]:
    """Return a row with its prompt and its decoded images and frames.

    Args:
        row: row of the data.
        options: requirements.
        column: `images` for a list, or `image` for the only image.

    Raises:
        DataError: the row cannot be used; the message is the reason.
    """
    examined = examine_row(row, options)
    if examined[REASON] is not None:
        raise DataError(examined[REASON])
    ready = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
    ready |= {name: examined[name] for name in ("choices", "solution") if examined[name] is not None or name in row}
    shown = {column: decoded_images(row, options, column)} | teacher_columns(row, options)
    return ready | {"prompt": examined["prompt"]} | shown


def decoded_images(row: Mapping[str, Any], options: RowOptions, column: str = "images") -> Any:
    """Return the decoded and resized images and frames of a row.

    Args:
        row: row of the data.
        options: requirements.
        column: `images` for a list, or `image` for the only image or None.
    """
    images = [open_image(value, folder_of(row, options.root)) for value in images_of(row)]
    shown = list(map(options.images.fitted, [*images, *_frames(row, options)]))
    return shown if column == "images" else shown[0] if shown else None


def teacher_columns(row: Mapping[str, Any], options: RowOptions) -> dict[str, list[Any]]:
    """Return the columns of decoded images for a teacher alone, in full size, that the data or the run have."""
    sources = {TEACHER_IMAGES: listed(row, TEACHER_IMAGES)} if TEACHER_IMAGES in row else {}
    sources |= {FULL_IMAGES: images_of(row)} if options.full_images else {}
    folder = folder_of(row, options.root)
    return {name: [open_image(value, folder) for value in values] for name, values in sources.items()}


def _frames(row: Mapping[str, Any], options: RowOptions) -> list[Any]:
    return frames_of(row, options.video_fps, options.max_video_frames, folder_of(row, options.root))


# Data sets with prompts, without unusable rows


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    keys: Keys = KEYS,
    on_skipped: Callable[["SkippedRow"], None] | None = None,
    shuffle_seed: int | None = None,
    **options: Any,
) -> tuple[Dataset | IterableDataset, list["SkippedRow"]]:
    """Add a column `prompt` to a data set, and return the data set without unusable rows, and the skipped rows.

    Image headers are read now, pixels when a row is used. Rows of a stream are checked as they are read: the list is
    empty, and `on_skipped` gets each row once. Frames of videos follow the images of a row in `images`.

    Args:
        dataset: rows that `read_row` reads, with columns named as `keys` say.
        split: its name in messages.
        keys: accepted names of columns.
        on_skipped: called for each skipped row of a stream; None: warn.
        shuffle_seed: seed of a stream: draw each row from the next 1000, which wait undecoded; None: keep the order.
        options: fields of `RowOptions`.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, no row is left, or the answers of more than a tenth
            of the rows cannot be read.
    """
    rules, dataset = RowOptions(**options), undecoded(dataset)
    first = require_columns(dataset, split, rules.needs_solution, keys)
    column = image_column(dataset.features, keys)
    if isinstance(dataset, IterableDataset):
        numbered = dataset.map(
            lambda row, place: renamed_row(row, keys) | {PLACE: place}, with_indices=True, remove_columns=list(first)
        )
        return _prepare_stream(numbered, split, rules, column, on_skipped, shuffle_seed), []
    names = known_names(dataset.column_names, keys)
    return _prepare_dataset(dataset.select_columns(list(names)).rename_columns(names), split, rules, column)


def _prepare_stream(
    numbered: IterableDataset, split: str, rules: RowOptions, column: str, on_skipped: Any, shuffle_seed: int | None
) -> IterableDataset:
    reported = set[Any]()

    def prepare(row: Mapping[str, Any]) -> dict[str, Any]:
        lifted = lift_nested(row)
        if all(isinstance(image, PIL.Image.Image) for image in lifted.get("images", ())):  # files are not to be named
            row = {**row, **lifted}
        try:
            return {**ready_row(row, rules, column), PLACE: row[PLACE], REASON: None}
        except DataError as error:
            return {PLACE: row[PLACE], REASON: reason_of(error)}

    def keeps(row: Mapping[str, Any]) -> bool:
        skip = SkippedRow(split, row[PLACE], row.get("id"), row[REASON])
        name = skip.row if skip.id is None else (str(skip.id), skip.reason)  # places change with the files' order
        if skip.reason is not None and name not in reported:  # however often the stream is read
            reported.add(name)
            (on_skipped or warn)(skip)
        return skip.reason is None

    def warn(row: SkippedRow) -> None:
        logger.warning(f"Skipped {split} row {row.row} of the stream: {row.reason}.")

    def usable(rows: IterableDataset) -> IterableDataset:
        return rows.map(prepare, remove_columns=list(OWN_COLUMNS)).filter(keeps).remove_columns([PLACE, REASON])

    if next(iter(usable(numbered)), None) is None:
        raise DataError(f"None of the rows of the {split} stream can be used: see the reasons above.")
    if shuffle_seed is not None:
        numbered = numbered.shuffle(seed=shuffle_seed, buffer_size=SHUFFLE_BUFFER)
    PREPARED_STREAMS.add(stream := usable(numbered))
    return stream


def _prepare_dataset(
    dataset: Dataset, split: str, rules: RowOptions, column: str
) -> tuple[Dataset, list["SkippedRow"]]:
    names = dataset.column_names
    has_conversations = not rules.needs_solution and "prompt" in names and isinstance(dataset[0]["prompt"], list)
    user_columns = {"choices", "solution"} & {*names} if has_conversations else set[str]()  # only rewards read them

    def stored(row: Mapping[str, Any]) -> dict[str, Any]:
        read = examine_row(row, rules) | dict.fromkeys(user_columns)
        texts = {name: None if read[name] is None else json.dumps(read[name]) for name in ("prompt", "solution")}
        return {name: texts.get(name, read[name]) for name in EXAMINED}

    examined = map_rows(dataset, stored, EXAMINED, rules, f"Reading rows ({split})", root=rules.root)
    reasons = examined[REASON][:]
    skipped = skipped_rows(split, reasons, dataset["id"][:] if "id" in names else None)
    unreadable = [row for row in skipped if row.reason.startswith("solution is")]
    if len(unreadable) > LARGEST_SHARE * len(dataset):
        answer = next((name for name in KEYS["solution"] if name in names), "solution")
        first, many = unreadable[0], f"{len(unreadable)} of the {len(dataset)} rows of {split}"
        problem = f"The answer in `{answer}` cannot be read in {many}, such as row {first.row}: {first.reason}"
        raise DataError(f"{problem}. Name the answer column with --solution_key.")
    made = [name for name in ("prompt", "choices", "solution", SIZES) if name not in user_columns
            if name in (*names, SIZES) or examined.data.column(name).null_count < len(examined)]  # fmt: skip
    kept = [name for name in names if name not in {*EXAMINED, *DIALOGUES, UNREADABLE} - user_columns]
    dataset = dataset.add_column(PLACE, range(len(dataset))).select_columns([*kept, PLACE])
    if not image_columns(dataset) and {*MEDIA} & {*kept}:
        dataset = dataset.add_column("images", [None] * len(dataset))  # the column that TRL looks for
    dataset = concatenate_datasets([dataset, examined.select_columns(made)], axis=1)
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    return dataset.with_transform(ShowRows(column, rules)), skipped


SHARED = "shared"  # in the place of a folder


def shared_folder(rows: Any, keys: Keys) -> Path:
    """Return the deepest folder in which all absolute paths of images and videos lie.

    Args:
        rows: a data set.
        keys: accepted names of columns.

    Raises:
        ConfigError: the rows are a stream, or no path is absolute.
    """
    if not isinstance(rows, Dataset):
        raise ConfigError("image_dir shared reads all paths first, which a stream does not allow: give the folder.")
    names = {column: name for column, name in known_names(rows.column_names, keys).items() if name in MEDIA}
    rows = undecoded(rows.with_format(None).select_columns(list(names))).rename_columns(names)
    values = (value for row in rows for value in (*images_of(row), *videos_of(row)))
    paths = (file.get("path") if isinstance(file, Mapping) and file.get("bytes") is None else file for file in values)
    texts = {path for path in paths if isinstance(path, str) and os.path.isabs(path)}
    folders = {os.path.dirname(path) for path in texts if not BASE64_IMAGE.fullmatch(path)}
    if not folders:
        raise ConfigError("image_dir is shared, but no image has an absolute path: leave the flag out.")
    return Path(os.path.commonpath(folders))


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    name: str,
    lengths: PromptLengths,
    limit: int,
    on_dropped: Callable[[str], None],
) -> Dataset | IterableDataset:
    """Drop the rows whose prompt is too long, as truncation would cut image tokens.

    A `Dataset` is measured at once, with a warning, a stream as it is read.

    Args:
        dataset: rows with prompts.
        name: name of the data in messages.
        lengths: counts the tokens of a prompt.
        limit: largest number of tokens.
        on_dropped: called with the name for each row that a stream drops.

    Raises:
        DataError: no row is within the limit.
    """
    if isinstance(dataset, IterableDataset):

        def keep(row: Mapping[str, Any]) -> bool:
            fits = lengths(row) <= limit
            if not fits:
                on_dropped(name)
            return fits

        return dataset.filter(keep)

    counts = prompt_lengths(dataset, lengths, f"Counting tokens ({name})")
    hint = "; --max_short_side or --max_pixels reduces images" if image_columns(dataset) else ""
    kept = [index for index, length in enumerate(counts) if length <= limit]
    if not kept:
        shortest = f"the shortest prompt of the {name} data has {min(counts, default=0)} tokens"
        raise DataError(f"max_prompt_length={limit} leaves no row: {shortest}. Raise it{hint}.")
    if len(kept) < len(dataset) and PartialState().is_main_process:
        rows = f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data"
        longest = f"the longest prompt has {max(counts)} tokens{hint}"
        logger.warning(f"max_prompt_length={limit}: skipped {rows} ({longest}).")
    return dataset if len(kept) == len(dataset) else dataset.select(kept)


def prompt_lengths(dataset: Dataset, lengths: PromptLengths, description: str) -> list[int]:
    """Return the number of tokens of every row's prompt.

    Args:
        dataset: rows with prompts.
        lengths: counts the tokens of a prompt.
        description: text of the progress bar.
    """
    rows = dataset
    if is_repeatable(dataset):
        names = ["prompt", *([SIZES] if prepared_transform(dataset) else image_columns(dataset))]
        rows = undecoded(dataset.with_format(None).select_columns(names))

    def count(row: Mapping[str, Any]) -> dict[str, int]:
        return {"length": lengths(row)}

    features, in_parallel = Features({"length": Value("int32")}), not lengths.needs_pixels
    return list(map_rows(rows, count, features, lengths.key, description, in_parallel=in_parallel)["length"][:])


# Rows as the trainer reads them


@dataclass(frozen=True)
class ShowRows:
    """Transform of prepared data that decodes images into `image` or `images`."""

    column: str
    rules: RowOptions

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of a batch."""
        ready = {name: values for name, values in batch.items() if name not in OWN_COLUMNS}
        if {*MEDIA} & batch.keys():
            rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            ready[self.column] = [decoded_images(row, self.rules, self.column) for row in rows]
            further = [teacher_columns(row, self.rules) for row in rows]
            ready |= {name: [columns[name] for columns in further] for name in further[0]}
        return ready


def prepared_transform(dataset: Dataset) -> ShowRows | None:
    """Return the transform of prepared data, or None for other data."""
    transform = dataset.format["format_kwargs"].get("transform")
    return transform if isinstance(transform, ShowRows) else None


def is_repeatable(dataset: object) -> bool:
    """Return whether rows can be read by number and never change, unlike rows from a user's transform."""
    if not isinstance(dataset, Dataset):
        return False
    return isinstance(dataset.format["format_kwargs"].get("transform"), ShowRows | None)


class ReadOnce:
    """A data set that reads a row and decodes its images once for all its copies in two consecutive batches.

    TRL's sampler gives every prompt G times in a batch, and the batch again for each micro-batch of a rollout. A row
    whose image is damaged is replaced by the next row of the data set. The choice depends on the row's number alone, so
    that all processes, and a resumed run, choose the same row.
    """

    def __init__(self, rows: Dataset, name: str = "training") -> None:
        self._rows, self._name = rows, name
        self._last: dict[int, dict[str, Any]] = {}
        self._reported: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by their numbers, copies of a row with the same images."""
        with ThreadPoolExecutor(DECODING_THREADS) as pool:  # Pillow decodes without Python's lock
            wanted = list(dict.fromkeys(indices))
            self._last = dict(zip(wanted, pool.map(self._read, wanted), strict=True))
        return [dict(self._last[index]) for index in indices]

    def _read(self, index: int) -> dict[str, Any]:
        if index in self._last:
            return self._last[index]
        reason = None
        for place in range(index, index + MAX_DAMAGED):
            try:
                row: dict[str, Any] = self._rows[place % len(self._rows)]
            except DataError as error:
                # An error of the system may not meet other processes, whose groups would then have other prompts.
                if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
                    raise
                reason = reason or reason_of(error)
                continue
            if reason is None:
                return row
            if index not in self._reported:
                self._reported.add(index)
                instead = f"is replaced by row {self._number(place)}"
                logger.warning(f"Row {self._number(index)} of the {self._name} data {instead}: {reason}.")
            return {**row, REPLACED: index}
        rows = f"Row {self._number(index)} of the {self._name} data and the next {MAX_DAMAGED - 1} rows"
        raise DataError(f"{rows} cannot be read; the first: {reason}.")

    def _number(self, index: int) -> int:
        """Return the number of a row in the user's data, before rows were skipped."""
        return int(self._rows.with_format(None)[index % len(self._rows)].get(PLACE, index))


def pop_replaced(rows: Sequence[dict[str, Any]]) -> int:
    """Remove the mark of rows that replace damaged rows, and return the number of marks."""
    return sum(row.pop(REPLACED, None) is not None for row in rows)


# Skipped rows


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be used."""

    split: str
    row: int
    id: Any
    reason: str


def skipped_rows(
    split: str, reasons: Sequence[str | None], ids: Sequence[Any] | None = None, places: Sequence[int] | None = None
) -> list[SkippedRow]:
    """Return the rows that have a reason to be skipped.

    Args:
        split: name of the data.
        reasons: one per row; None: the row can be used.
        ids: one per row; None: its place.
        places: number of each row in the user's data; None: 0, 1, 2, …

    Raises:
        DataError: no row can be used.
    """
    places = range(len(reasons)) if places is None else places
    about = zip(places, places if ids is None else ids, reasons, strict=True)
    skipped = [SkippedRow(split, place, name, reason) for place, name, reason in about if reason is not None]
    if len(skipped) == len(reasons):
        rows = f"None of the {len(reasons)} rows of the {split} data"
        raise DataError(f"{rows} can be used; the first: {skipped[0].reason}.")
    return skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path, mode: str = "w") -> None:
    """Write skipped rows as JSONL, and warn; do nothing if there are none.

    Args:
        skipped: the rows.
        path: file to write, whose folder is created.
        mode: "w" to replace the file, "a" to append rows that a stream skips.
    """
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), default=str) + "\n" for row in skipped)
    first = f"the first: {skipped[0].split} row {skipped[0].row}: {skipped[0].reason}"
    logger.warning(f"Skipped {len(skipped)} unusable rows, listed with their reasons in {path}; {first}.")


PARALLEL_FROM = 1000  # number of rows that are checked in several processes, with a cached result
READERS = (  # the files of this package that a cached result depends on
    "data/*.py", "prepare.py", "rewards/*.toml", "rewards/*.txt",
    *(f"rewards/{name}.py" for name in ("answers", "equality", "phrases")),
)  # fmt: skip
CHECKSUM = 16  # bytes at the end of a cached result
PART_ROWS = 100  # rows that a process examines at a time
MAX_PROCESSES = 16
_part_of_worker: list[Callable[[int], pyarrow.Table]] = []


def map_rows(
    dataset: Dataset,
    examine: Callable[[Mapping[str, Any]], dict[str, Any]],
    features: Features,
    key: Any,
    description: str,
    *,
    root: Path = Path(),
    in_parallel: bool = True,
) -> Dataset:
    """Return a data set with the result of `examine` for every row.

    From 1,000 rows on, the first process of each machine starts workers for it, and caches the result on disk. The
    workers end with this process even if it is killed, and leave no files, unlike those of `Dataset.map`.

    Args:
        dataset: the rows.
        examine: returns one value for each of `features`; JSON as a text.
        features: columns of the result.
        key: everything besides the rows and their files that the result depends on.
        description: text of the progress bar.
        root: folder that relative paths of images and videos start from.
        in_parallel: whether `examine` may run in other processes.
    """

    def part(start: int) -> pyarrow.Table:
        rows = dataset.select(range(start, min(start + PART_ROWS, len(dataset))))
        return Dataset.from_list(list(map(examine, rows)), features=features).data.table

    if len(dataset) < PARALLEL_FROM:
        return Dataset.from_list(list(map(examine, dataset)), features=features)
    name = Hasher.hash([dataset._fingerprint, key, _code_hash(), _file_states(dataset, root)])
    path = Path(config.HF_DATASETS_CACHE) / "vgr_trl" / f"{name}.arrow"
    with PartialState().local_main_process_first():
        table = _cached(path)
        if table is None:
            starts = range(0, len(dataset), PART_ROWS)
            workers = min(MAX_PROCESSES, os.cpu_count() or 1)
            with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (part,)) as pool:  # starts on demand
                parts = pool.map(_run_part, starts) if in_parallel else map(part, starts)
                table = pyarrow.concat_tables(tqdm(parts, description, len(starts)))
            _keep(table, path)
        return Dataset(InMemoryTable(table), fingerprint=name)


def _start_worker(part: Callable[[int], pyarrow.Table]) -> None:
    exit_with_parent()
    _part_of_worker.append(part)


def _run_part(start: int) -> pyarrow.Table:
    return _part_of_worker[-1](start)


def _cached(path: Path) -> pyarrow.Table | None:
    """Return a cached result, or None if it is missing or its checksum is wrong."""
    with suppress(OSError), pyarrow.memory_map(str(path)) as file:
        content = file.read_buffer()
        if xxh3_128_digest(content[:-CHECKSUM]) == bytes(content[-CHECKSUM:]):
            return pyarrow.ipc.open_stream(content[:-CHECKSUM]).read_all()
    return None


def _keep(table: pyarrow.Table, path: Path) -> None:
    """Write a result and its checksum to the cache, or warn if the cache cannot be written."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    try:
        write_atomic(path, content + xxh3_128_digest(content))
    except OSError as error:
        logger.warning(f"{path.parent} cannot be written ({error_text(error)}): free space, or set HF_DATASETS_CACHE.")


def _file_states(dataset: Dataset, root: Path) -> list[Any]:
    """Return the size and time of each file that the rows name, or None for a missing file."""
    names = [name for name in MEDIA if name in dataset.column_names and _names_files(dataset.data.column(name))]
    rows = dataset.select_columns([*names, *({FOLDER} & {*dataset.column_names})]).to_list()
    return [_file_state(value, folder_of(row, root)) for row in rows for value in (*images_of(row), *videos_of(row))]


def _names_files(column: Any) -> bool:
    """Return whether a column has paths without the bytes of the file."""
    if pyarrow.types.is_list(column.type):
        return _names_files(compute.list_flatten(column))
    if not pyarrow.types.is_struct(column.type):
        return not pyarrow.types.is_binary(column.type)
    if not {"bytes", "path"} <= {field.name for field in column.type}:
        return False
    data, path = (compute.struct_field(column, [name]) for name in ("bytes", "path"))
    return bool(compute.any(compute.and_(data.is_null(), path.is_valid())).as_py())


def _file_state(value: Any, folder: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(os.path.join(folder, value["path"] if isinstance(value, Mapping) else value))
        return state.st_size, state.st_ctime_ns  # changes with the permissions too
    except (OSError, ValueError, TypeError):  # not the path of a file
        return None


@cache
def _code_hash() -> str:
    """Hash the code that reads rows, answers and images, so that a new release does not load old results."""
    files = sorted(file for pattern in READERS for file in Path(__file__).parents[1].glob(pattern))
    return str(Hasher.hash([PIL.__version__, *(file.read_bytes() for file in files)]))
