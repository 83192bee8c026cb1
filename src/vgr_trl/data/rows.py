"""Prepare rows for training: check every row at the start, decode its images when it is used.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone; or it is in a format
that `read_row.py` knows, or has other names for these that flags give.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, Json, List, Value, concatenate_datasets, config
from datasets.fingerprint import Hasher
from transformers.utils import logging

from vgr_trl.data.images import (
    ANY_SIZE,
    DEFAULT_VIDEO_OPTIONS,
    FOLDER,
    FURTHER_IMAGES,
    IMAGE_COLUMNS,
    NUMBERED_IMAGES,
    PLACE,
    VIDEO_COLUMNS,
    ImageLimits,
    VideoOptions,
    boxes_of,
    folder_of,
    frames_of,
    image_size,
    images_of,
    open_image,
)
from vgr_trl.data.lengths import SIZES, PromptLengths
from vgr_trl.data.prompts import (
    SYSTEM_PROMPT,
    QuestionTemplate,
    SystemTemplate,
    build_prompt,
    drop_video_placeholders,
    placed,
    special_problem,
)
from vgr_trl.data.read_row import (
    DIALOGUES,
    KEYS,
    UNREADABLE,
    Keys,
    Question,
    image_columns,
    read_row,
    renamed,
    renamed_row,
    require_columns,
    undecoded,
)
from vgr_trl.rewards import answers
from vgr_trl.utils import DataError

logger = logging.get_logger(__name__)

NUMBERED = (*NUMBERED_IMAGES, *FURTHER_IMAGES)
MEDIA = (*IMAGE_COLUMNS, *NUMBERED, *VIDEO_COLUMNS)
REASON = "__reason__"  # column: why a row cannot be used
REPLACED = "__replaced__"  # key of a row that took the place of one that cannot be decoded
OWN_COLUMNS = (*MEDIA, *DIALOGUES, PLACE, FOLDER, UNREADABLE, REASON, SIZES)
EXAMINED = Features(
    {"prompt": Json(), "choices": List(Value("string")), "solution": Json(), REASON: Value("string")}
    | {SIZES: List(List(Value("int32")))}
)
OF_FILES = ("image", "video", "file", "its videos")  # how reasons begin that a repaired file may remove
LARGEST_SHARE = 0.1  # of rows whose answer cannot be read
PARALLEL_FROM = 1000  # rows from which on a pass runs in several processes and its result is cached
MAX_PROCESSES = 16
DECODING_THREADS = min(8, os.cpu_count() or 1)
MAX_DAMAGED = 100  # consecutive rows; beyond it, a disk is probably missing
SHUFFLE_BUFFER = 1000  # rows of a stream that wait, their images undecoded
# Another process may not meet these. Replacing the row in this process only would mix prompts within a group.
SYSTEM_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)

OnSkipped = Callable[["SkippedRow"], None] | None


@dataclass(frozen=True)
class RowOptions:
    """Requirements of a row to be trained on.

    Attributes:
        root: folder that relative paths of images and videos start from.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; rows with a `prompt` of their own keep it.
        videos: rate and limit of the frames of videos.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.
        images: the sizes that images may have, and are brought to.
        boxes: whether something reads the boxes of rows with one image, so that rows with a bad one are left out.
        decodes: whether to decode every image during the check, to find damage that headers do not show.
    """

    root: Path = Path()
    needs_solution: bool = True
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS
    special: re.Pattern[str] | None = None
    images: ImageLimits = ANY_SIZE
    boxes: bool = False
    decodes: bool = False


def examine_row(row: Mapping[str, Any], options: RowOptions) -> dict[str, Any]:
    """Return prompt, choices, solution and sizes of the images of a row; or why it cannot be used, as `REASON`.

    `right` is what the solution means, None where it need not be known.

    Args:
        row: with undecoded or decoded images. Videos are decoded, as only that tells how many frames they have.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    found: dict[str, Any] = dict.fromkeys((*EXAMINED, "right"))
    question = read_row(row, needs_answer=options.needs_solution)
    if isinstance(question, str):
        return found | {REASON: question}
    try:
        prompt = _conversation(row, question, options.system_prompt)
        if (problem := special_problem(options.special, _conversation(row, question, None))) is not None:
            raise DataError(problem)
        root = folder_of(row, options.root)
        sizes = [open_image(value, root).size if options.decodes else image_size(value, root)
                 for value in question.images]  # fmt: skip
        sizes += [frame.size for frame in frames_of(row, options.videos, root)]
        sizes = [options.images.size_of(*size) for size in sizes]
        if options.boxes and len(sizes) == 1:
            boxes_of(row, sizes[0], "it")
    except DataError as error:
        return found | {REASON: str(error).rstrip(".")}
    answer = {"choices": question.choices, "solution": question.answer, "right": question.right}
    return found | {"prompt": prompt, SIZES: sizes} | answer


def _conversation(row: Mapping[str, Any], question: Question, system: str | SystemTemplate | None) -> Any:
    source = row.get("source") if isinstance(row.get("source"), str) else None
    prompt: Any = question.prompt
    if not question.is_complete or isinstance(system, QuestionTemplate):
        prompt = build_prompt(prompt, question.choices, system_prompt=system, source=source)
    return drop_video_placeholders(prompt) if any(row.get(name) is not None for name in VIDEO_COLUMNS) else prompt


def ready_row(row: Mapping[str, Any], options: RowOptions, several: bool = True) -> dict[str, Any]:
    """Return a row with its prompt and its decoded images, the frames of videos included.

    Args:
        several: whether there may be several images, which are then in `images`, in every row alike.

    Raises:
        DataError: the row cannot be used; the message is the reason.
    """
    found = examine_row(row, options)
    if found[REASON] is not None:
        raise DataError(found[REASON])
    ready = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
    ready |= {name: found[name] for name in ("choices", "solution") if found[name] is not None or name in row}
    ready["prompt"] = placed(found["prompt"])
    shown = decoded_images(row, options)
    return ready | ({"images": shown} if several else {"image": shown[0] if shown else None})


def decoded_images(row: Mapping[str, Any], options: RowOptions) -> list[Any]:
    """Return the decoded images and frames of a row in the size that the model gets; raise `DataError` if damaged."""
    folder = folder_of(row, options.root)
    opened = [open_image(value, folder) for value in images_of(row)]
    return list(map(options.images.fitted, [*opened, *frames_of(row, options.videos, folder)]))


# Passes over a whole data set


def map_rows(
    dataset: Dataset,
    examine: Callable[[Mapping[str, Any]], dict[str, Any]],
    features: Features,
    key: Any,
    description: str,
    *,
    in_parallel: bool = True,
    is_stale: Callable[[Dataset], bool] = lambda found: False,
) -> Dataset:
    """Return a data set with the result of `examine` for every row.

    From 1,000 rows on, `examine` runs in several processes, and the result is stored in the cache of `datasets`. The
    first process of each machine computes it, the others load it.

    Args:
        examine: returns one value for each of `features`; JSON as a text.
        key: everything besides the rows that the result depends on.
        in_parallel: whether `examine` may run in other processes.
        is_stale: whether a cached result has to be computed again.
    """
    if len(dataset) < PARALLEL_FROM:
        return Dataset.from_list(list(map(examine, dataset)), features=features)
    fingerprint = Hasher.hash([dataset._fingerprint, key, _code_hash()])
    folder = Path(config.HF_DATASETS_CACHE) / "vgr_trl"
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"features": features, "remove_columns": dataset.column_names, "desc": description}
    options |= {"new_fingerprint": fingerprint, "cache_file_name": str(folder / f"{fingerprint}.arrow")}
    if in_parallel:
        options["num_proc"] = min(MAX_PROCESSES, os.cpu_count() or 1)
    with PartialState().local_main_process_first():
        found = dataset.map(examine, **options)
        return dataset.map(examine, load_from_cache_file=False, **options) if is_stale(found) else found


@cache
def _code_hash() -> str:
    """Hash the code that reads rows and answers, so that a new release does not load results of an old one."""
    folders = Path(__file__).parent, Path(answers.__file__).parent
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in (".py", ".toml"))
    return str(Hasher.hash([file.read_bytes() for file in files]))


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    keys: Keys = KEYS,
    on_skipped: OnSkipped = None,
    shuffle_seed: int | None = None,
    **options: Any,
) -> tuple[Dataset | IterableDataset, list["SkippedRow"]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Headers of images are read, their pixels when a row is used. Of a stream the rows are checked as they are read: the
    list is empty, and `on_skipped` gets each row once. Frames of videos stand behind the images of a row in `images`.

    Args:
        dataset: rows as described at the top of this file.
        on_skipped: called for each row of a stream that is left out; None: a warning.
        shuffle_seed: of a stream: draw each row from the next 1000, which wait with their images undecoded, in a
            small part of the memory that shuffling the result takes. None: keep the order.
        options: of `RowOptions`.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, no row is left, or the answers of more than a tenth
            of the rows cannot be read.
    """
    rules = RowOptions(**options)
    if isinstance(dataset, IterableDataset):
        return _prepare_stream(dataset, split, keys, rules, on_skipped, shuffle_seed), []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    dataset = undecoded(dataset)
    unread = list(dataset[UNREADABLE]) if UNREADABLE in dataset.column_names else [None]
    if None in unread:
        require_columns(dataset[unread.index(None)], split, rules.needs_solution, keys, dataset.features)
    dataset = renamed(dataset, keys)
    found = _examined(dataset, rules, f"Reading rows ({split})")
    reasons = list(found[REASON])
    skipped = skipped_rows(split, reasons, dataset["id"] if "id" in dataset.column_names else None)
    _require_answers(skipped, dataset)
    column = "images" if _are_several(dataset) else "image"
    made = {name for name in ("choices", "solution") if name in dataset.column_names or _has_value(found, name)}
    kept = [name for name in dataset.column_names if name not in {*found.column_names, *DIALOGUES, UNREADABLE}]
    dataset = dataset.select_columns(kept).add_column(PLACE, range(len(dataset)))
    if column == "images" and not {*IMAGE_COLUMNS} & {*kept} and {*MEDIA} & {*kept}:
        dataset = dataset.add_column("images", [None] * len(dataset))  # the column that TRL looks for
    dataset = concatenate_datasets([dataset, found.select_columns(["prompt", SIZES, *sorted(made)])], axis=1)
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    return dataset.with_transform(ShowRows(column, rules)), skipped


def _examined(dataset: Dataset, rules: RowOptions, description: str) -> Dataset:
    """Return the result of `examine_row` for every row, JSON as texts."""

    def has_repaired_file(found: Dataset) -> bool:
        rejected = [row for row, reason in enumerate(found[REASON]) if (reason or "").startswith(OF_FILES)]
        return any(examine_row(dataset[row], rules)[REASON] is None for row in rejected)

    examine = partial(_store_as_json, options=rules)
    return map_rows(dataset, examine, EXAMINED, rules, description, is_stale=has_repaired_file)


def _store_as_json(row: Mapping[str, Any], options: RowOptions) -> dict[str, Any]:
    found = examine_row(row, options)
    del found["right"]
    texts = {name: None if found[name] is None else json.dumps(found[name]) for name in ("prompt", "solution")}
    return found | texts


def _has_value(dataset: Dataset, column: str) -> bool:
    """Return whether a column has a value in any row."""
    values = dataset.data.column(column)
    return bool(values.null_count < len(values))


def _require_answers(skipped: Sequence["SkippedRow"], dataset: Dataset) -> None:
    unreadable = [row for row in skipped if row.reason.startswith("solution is")]
    if len(unreadable) > LARGEST_SHARE * len(dataset):
        column = next((name for name in KEYS.answer if name in dataset.column_names), "solution")
        raise DataError(
            f"The answer in `{column}` cannot be read in {len(unreadable)} of the {len(dataset)} rows of "
            f"{unreadable[0].split}, such as row {unreadable[0].row}: {unreadable[0].reason}. Name the answers' column "
            "by --solution_key."
        )


def _are_several(dataset: Dataset | IterableDataset, keys: Keys = KEYS) -> bool:
    """Whether a row may have several images: they are in `images` then, which TRL looks for in a batch's first row."""
    names = dataset.column_names
    name = keys.image[0] if keys != KEYS and len(keys.image) == 1 else "image"
    if names is None or name not in names or name == "images" or ("images" in names and keys.image == KEYS.image):
        return True
    if {*VIDEO_COLUMNS, *keys.video, *FURTHER_IMAGES} & set(names):
        return True
    return isinstance((dataset.features or {}).get(name), List | Json)


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    lengths: PromptLengths,
    limit: int,
    name: str = "train",
    on_dropped: Callable[[], None] = lambda: None,
) -> Dataset | IterableDataset:
    """Return `dataset` without the rows whose prompt has more than `limit` tokens: truncation would cut image tokens.

    A `Dataset` is measured once, at the start, and what was left out is logged; a stream is measured as it is read.

    Args:
        limit: `max_prompt_length`, in tokens.
        on_dropped: called for each row that a stream leaves out.

    Raises:
        DataError: no row is within the limit.
    """
    if isinstance(dataset, IterableDataset):

        def keep(row: Mapping[str, Any]) -> bool:
            fits = lengths(row) <= limit
            if not fits:
                on_dropped()
            return fits

        return dataset.filter(keep)

    counts = prompt_lengths(dataset, lengths, f"Counting tokens ({name})")
    hint = "; --max_short_side or --max_pixels reduces images" if image_columns(dataset) else ""
    kept = [index for index, length in enumerate(counts) if length <= limit]
    if not kept:
        shortest = f"the shortest prompt of the {name} data has {min(counts, default=0)} tokens"
        raise DataError(f"max_prompt_length={limit} leaves no row: {shortest}. Raise it{hint}.")
    if len(kept) == len(dataset):
        return dataset
    if PartialState().is_main_process:
        rows = f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data"
        longest = f"the longest prompt has {max(counts)} tokens{hint}"
        logger.warning(f"max_prompt_length={limit}: left out {rows} ({longest}).")
    return dataset.select(kept)


def prompt_lengths(dataset: Dataset, lengths: PromptLengths, description: str) -> list[int]:
    """Return the tokens of every row's prompt."""
    rows = dataset
    if shown := prepared_transform(dataset):
        rows = dataset.with_format(None).select_columns(["prompt", SIZES])
    elif is_repeatable(dataset):
        names = [name for name in ("prompt", *IMAGE_COLUMNS) if name in dataset.column_names]
        rows = undecoded(dataset.with_format(None).select_columns(names))
    count = partial(_length, lengths=lengths, is_shown=shown is not None)
    features = Features({"length": Value("int32")})
    return list(
        map_rows(rows, count, features, lengths.key, description, in_parallel=not lengths.needs_pixels)["length"]
    )


def _length(row: Mapping[str, Any], lengths: PromptLengths, is_shown: bool) -> dict[str, int]:
    return {"length": lengths({**row, "prompt": placed(row["prompt"])} if is_shown else row)}


# Rows as the trainer reads them


@dataclass(frozen=True)
class ShowRows:
    """The transform of prepared data: replace placeholders by parts and decode images, as TRL takes them.

    Attributes:
        column: `image` or `images`.
        rules: by which the rows were checked.
    """

    column: str
    rules: RowOptions

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of a batch."""
        ready = {name: values for name, values in batch.items() if name not in OWN_COLUMNS}
        if "prompt" in batch:
            ready["prompt"] = [placed(prompt) for prompt in batch["prompt"]]
        names = [name for name in (*MEDIA, FOLDER) if name in batch]
        if set(names) & set(MEDIA):
            columns = zip(*(batch[name] for name in names), strict=True)
            opened = [decoded_images(dict(zip(names, values, strict=True)), self.rules) for values in columns]
            ready[self.column] = opened if self.column == "images" else [of[0] if of else None for of in opened]
        return ready


def prepared_transform(dataset: Dataset) -> ShowRows | None:
    """Return the transform of prepared data, None for other data."""
    transform = dataset.format["format_kwargs"].get("transform")
    return transform if isinstance(transform, ShowRows) else None


def is_repeatable(dataset: object) -> bool:
    """Return whether rows can be read by number and are the same every time; a transform of a user's may be random."""
    if not isinstance(dataset, Dataset):
        return False
    return dataset.format["format_kwargs"].get("transform") is None or prepared_transform(dataset) is not None


class ReadOnce:
    """A data set whose rows are read, and their images decoded, once for all copies of them in one batch and the next.

    TRL's sampler gives every prompt G times in a batch, and the batch again for each micro-batch of a rollout, of which
    the trainer looks at the first. A row whose image is damaged is replaced by the next row of the data set. The
    replacement depends on the row's number only, so that all processes, and a resumed run, choose the same.

    Args:
        rows: for which `is_repeatable` holds.
        name: of the data, for messages.
    """

    def __init__(self, rows: Dataset, name: str = "training") -> None:
        self._rows, self._name, self._last = rows, name, dict[int, dict[str, Any]]()
        self._reported: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by their numbers; equal ones are copies with the same images."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._last]
        with ThreadPoolExecutor(DECODING_THREADS) as pool:  # Pillow decodes without Python's lock
            read = dict(zip(missing, pool.map(self._read, missing), strict=True))
        self._last = {index: read[index] if index in read else self._last[index] for index in dict.fromkeys(indices)}
        return [dict(self._last[index]) for index in indices]

    def _read(self, index: int) -> dict[str, Any]:
        reason = None
        for place in range(index, index + MAX_DAMAGED):
            place %= max(1, len(self._rows))
            try:
                row: dict[str, Any] = self._rows[place]
            except (DataError, OSError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                if isinstance(cause, OSError) and cause.errno in SYSTEM_ERRORS:
                    raise
                reason = reason or str(error).rstrip(".")
                continue
            if reason is None:
                return row
            if index not in self._reported:
                self._reported.add(index)
                damaged, instead = self._number(index), self._number(place)
                logger.warning(f"Row {damaged} of the {self._name} data is replaced by row {instead}: {reason}.")
            return {**row, REPLACED: index}
        rows = f"Row {self._number(index)} of the {self._name} data and the next {MAX_DAMAGED - 1} rows"
        raise DataError(f"{rows} cannot be read; the first: {reason}.")

    def _number(self, index: int) -> int:
        """Return the number of a row in the user's data, from which others may have been left out."""
        return int(self._rows.with_format(None)[index].get(PLACE, index))


def pop_replaced(rows: Sequence[dict[str, Any]]) -> int:
    """Remove the mark of rows that replace a damaged one, and return how many have it."""
    return sum(row.pop(REPLACED, None) is not None for row in rows)


# Streams


def _prepare_stream(
    dataset: IterableDataset, split: str, keys: Keys, options: RowOptions, on_skipped: OnSkipped, seed: int | None
) -> IterableDataset:
    """Return `dataset` with its rows made ready, and without those that cannot be used; see `prepare_rows`."""
    rows = undecoded(dataset)
    first = next((row for row in rows if row.get(UNREADABLE) is None), None) or next(iter(rows), None)
    if first is None:
        raise DataError(f"The {split} stream has no rows: give a data set with at least one.")
    if first.get(UNREADABLE) is None:
        require_columns(first, split, options.needs_solution, keys, dataset.features)
    several = _are_several(dataset, keys)

    def number(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {**renamed_row(row, keys), PLACE: index}

    def prepare(row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {**ready_row(row, options, several), PLACE: row[PLACE], REASON: None}
        except DataError as error:
            return {PLACE: row[PLACE], REASON: str(error).rstrip(".")}

    sieve = Sieve(split, lambda row: row[REASON], on_skipped)

    def usable(rows: IterableDataset) -> IterableDataset:
        ready = rows.map(prepare, remove_columns=list(OWN_COLUMNS))
        return ready.filter(lambda row: sieve.keeps(row, row[PLACE])).remove_columns([PLACE, REASON])

    # Without the old columns, a map keeps those that have another name now.
    numbered = rows.map(number, with_indices=True, remove_columns=list(first))
    sieve.require_row(usable(numbered))
    if seed is not None:
        numbered = numbered.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return usable(numbered)


# Rows left out


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out."""

    split: str
    row: int
    id: Any
    reason: str


@dataclass
class Sieve:
    """Leaves out rows of a stream, and reports each once however often the stream is read.

    Attributes:
        split: its name, for messages.
        examine: returns why a row cannot be used, None if it can.
        on_skipped: called once for each row that is left out; None: a warning.
    """

    split: str
    examine: Callable[[Mapping[str, Any]], str | None]
    on_skipped: OnSkipped = None
    _reported: set[Any] = field(default_factory=set)

    def keeps(self, row: Mapping[str, Any], index: int) -> bool:
        """Return whether `row` can be used; report it by its place `index` otherwise."""
        reason = self.examine(row)
        if reason is None:
            return True
        name = index if row.get("id") is None else (str(row["id"]), reason)  # the place changes with the files' order
        if name not in self._reported:
            self._reported.add(name)
            if self.on_skipped is not None:
                self.on_skipped(SkippedRow(self.split, index, row.get("id"), reason))
            else:
                logger.warning(f"Left out {self.split} row {index} of the stream: {reason}.")
        return False

    def require_row(self, kept: IterableDataset) -> None:
        """Raise `DataError` if `kept`, what is left of the stream, has no row."""
        if next(iter(kept), None) is None:
            rows = f"None of the {len(self._reported)} rows of the {self.split} stream"
            raise DataError(f"{rows} can be used: see the reasons above.")


def skipped_rows(
    split: str, reasons: Sequence[str | None], ids: Sequence[Any] | None = None, places: Sequence[int] | None = None
) -> list[SkippedRow]:
    """Return the rows that have a reason not to be used.

    Args:
        reasons: why each row of the split cannot be used, None where it can.
        ids, places: of the rows; None: their numbers.

    Raises:
        DataError: no row is left.
    """
    places = range(len(reasons)) if places is None else places
    ids = places if ids is None else ids
    skipped = [
        SkippedRow(split, places[row], ids[row], reason) for row, reason in enumerate(reasons) if reason is not None
    ]
    if len(skipped) == len(reasons):
        rows = f"None of the {len(reasons)} rows of the {split} data"
        raise DataError(f"{rows} can be used; the first: {skipped[0].reason}.")
    return skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path, mode: str = "w") -> None:
    """Write the rows left out to `path`, one JSON object per line, and warn with the count and the first reason.

    Args:
        mode: in which the file is opened: `a` adds to it, as for the rows that a stream leaves out one by one.
    """
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), default=str) + "\n" for row in skipped)
    first = skipped[0]
    logger.warning(
        f"Left out {len(skipped)} rows that cannot be used, listed with their reasons in {path}; the first: "
        f"{first.split} row {first.row}: {first.reason}."
    )
