"""Rows of the user's data as training reads them: understood, checked, with prompts and images.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone; or it is in a format
that `columns.py` knows, or has other names for these that flags give.
"""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, Features, Image, IterableDataset, Json, List, concatenate_datasets
from datasets.fingerprint import Hasher
from tqdm.auto import tqdm
from transformers.utils import logging

from vgr_trl.data.columns import (
    DIALOGUES,
    KEYS,
    UNREADABLE,
    Keys,
    Reading,
    image_columns,
    read_row,
    renamed,
    renamed_row,
    require_columns,
    undecoded,
    with_column,
)
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
    image_bytes,
    images_of,
    open_image,
    show_rows,
    videos_of,
)
from vgr_trl.data.prompts import (
    SYSTEM_PROMPT,
    QuestionTemplate,
    SystemTemplate,
    build_prompt,
    placed,
    special_problem,
    without_video_placeholders,
)
from vgr_trl.utils import DataError, RewardError

logger = logging.get_logger(__name__)

NUMBERED = (*NUMBERED_IMAGES, *FURTHER_IMAGES)
GONE = (*IMAGE_COLUMNS, *NUMBERED, *VIDEO_COLUMNS, *DIALOGUES, PLACE, FOLDER, UNREADABLE)
LARGEST_SHARE = 0.1  # of rows whose answer cannot be read
FRAMES_IN_MEMORY = 8  # rows whose frames wait to be written, as they are large
JPEG_QUALITY = 95
SHUFFLE_BUFFER = 1000  # rows of a stream that wait, their images undecoded

Found = TypeVar("Found")
OnSkipped = Callable[["SkippedRow"], None] | None


@dataclass(frozen=True)
class RowOptions:
    """What a row needs before it can be trained on, and what becomes of it.

    Attributes:
        root: folder that relative paths of images and videos start from.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; rows with a `prompt` of their own keep it.
        videos: rate and limit of the frames of videos.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.
        images: the sizes that images may have, and are brought to.
        boxes: whether something reads the boxes of rows with one image, so that rows with a bad one are left out.
    """

    root: Path = Path()
    needs_solution: bool = True
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS
    special: re.Pattern[str] | None = None
    images: ImageLimits = ANY_SIZE
    boxes: bool = False


def understand(row: Mapping[str, Any], options: RowOptions) -> tuple[dict[str, Any], list[Any]]:
    """Return prompt, choices and solution of a row, and its images and frames in the size that the model gets.

    Args:
        row: with undecoded or decoded images.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
        DataError, RewardError: the row cannot be used; the message is the reason.
    """
    reading = read_row(row, needs_answer=options.needs_solution)
    prompt = _conversation(row, reading, options.system_prompt)
    if (problem := special_problem(options.special, _conversation(row, reading, None))) is not None:
        raise DataError(problem)
    root = folder_of(row, options.root)
    opened = [*(open_image(value, root) for value in reading.images), *frames_of(row, options.videos, root)]
    shown = list(map(options.images.fitted, opened))
    if options.boxes and len(shown) == 1:
        boxes_of(row, shown[0].size, "it")
    return {"prompt": prompt, "choices": reading.choices, "solution": reading.answer}, shown


def ready_row(row: Mapping[str, Any], options: RowOptions, several: bool = True) -> dict[str, Any]:
    """Return a row with its prompt and its images, those of videos included; raises as `understand`.

    Args:
        several: whether there may be several images, which are then in `images`, in every row alike.
    """
    texts, shown = understand(row, options)
    ready = {name: value for name, value in row.items() if name not in GONE}
    ready |= {name: value for name, value in texts.items() if value is not None or name in row}
    ready["prompt"] = placed(texts["prompt"])
    return ready | ({"images": shown} if several else {"image": shown[0] if shown else None})


def _texts_or_reason(row: Mapping[str, Any], options: RowOptions) -> dict[str, Any] | str:
    try:
        return understand(row, options)[0]
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")


def _conversation(
    row: Mapping[str, Any], reading: Reading, system_prompt: str | SystemTemplate | None
) -> list[dict[str, Any]]:
    source = row.get("source") if isinstance(row.get("source"), str) else None
    prompt: Any = reading.prompt
    if not reading.is_complete or isinstance(system_prompt, QuestionTemplate):
        prompt = build_prompt(prompt, reading.choices, system_prompt=system_prompt, source=source)
    return without_video_placeholders(prompt) if any(row.get(name) is not None for name in VIDEO_COLUMNS) else prompt


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

    Every image is decoded once to see whether it can be, each process looking at its share. Of a stream the rows are
    checked as they are read: the list is empty, and `on_skipped` gets each row once. Videos become images: of a
    data set with a column `video` or `videos`, each row has its images and then its frames in `images`.

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
    broken = dataset[UNREADABLE] if UNREADABLE in dataset.column_names else [None]
    if None in broken:
        first = dict(dataset[list(broken).index(None)])
        require_columns(first, split, rules.needs_solution, keys, dataset.features)
    dataset = renamed(dataset, keys)
    found = scan(dataset, partial(_texts_or_reason, options=rules), f"check rows ({split})")
    reasons = [row if isinstance(row, str) else None for row in found]
    skipped = skipped_rows(split, reasons, dataset["id"] if "id" in dataset.column_names else None)
    unreadable = [row for row in skipped if row.reason.startswith("solution is")]
    if len(unreadable) > LARGEST_SHARE * len(dataset):
        column = next((name for name in KEYS.answer if name in dataset.column_names), "solution")
        raise DataError(
            f"The answer in `{column}` cannot be read in {len(unreadable)} of the {len(dataset)} rows of {split}, "
            f"such as row {unreadable[0].row}: {unreadable[0].reason}. Name the answers' column by --solution_key."
        )
    dataset = dataset.add_column(PLACE, list(range(len(dataset))))
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    dataset = _with_texts(dataset, [row for row in found if not isinstance(row, str)])
    dataset = _with_all_images(dataset, rules.videos, rules.root)
    dataset = dataset.remove_columns([name for name in (UNREADABLE, *DIALOGUES) if name in dataset.column_names])
    column = "images" if _are_several(dataset) else "image"
    shown = partial(show_rows, root=rules.root, column=column, images=rules.images)
    return dataset.with_transform(shown), skipped


def scan(dataset: Dataset, examine: Callable[[Mapping[str, Any]], Found], description: str) -> list[Found]:
    """Return `examine(row)` of every row, in order, on every process.

    Each process examines its share.
    """
    state = PartialState()
    share = range(state.process_index, len(dataset), state.num_processes)
    bar = tqdm(share, desc=description, delay=3, disable=not state.is_local_main_process)
    results = dict(gather_object([(index, examine(dataset[index])) for index in bar]))
    return [results[index] for index in range(len(dataset))]


def _with_texts(dataset: Dataset, texts: Sequence[Mapping[str, Any]]) -> Dataset:
    """Return `dataset` with prompts, and the options and answers under the names that rewards know them by."""
    for name in ("choices", "solution", "prompt"):
        values = [row[name] for row in texts]
        if values != (list(dataset[name]) if name in dataset.column_names else [None] * len(values)):
            dataset = with_column(dataset, name, values)
    return dataset


def _with_all_images(dataset: Dataset, options: VideoOptions, root: Path) -> Dataset:
    """Return `dataset` with its numbered images, and the frames of its videos as JPEG, in order in the column `images`.

    They are written to the cache of `datasets`, where there is one, by one process of each machine.
    """
    if {*VIDEO_COLUMNS, *NUMBERED}.isdisjoint(dataset.column_names):
        return dataset
    shown = [name for name in (*IMAGE_COLUMNS, *NUMBERED, *VIDEO_COLUMNS) if name in dataset.column_names]
    read = dataset.select_columns([*shown, *(name for name in (FOLDER,) if name in dataset.column_names)])

    def fill(row: Mapping[str, Any]) -> dict[str, Any]:
        start = folder_of(row, root)
        images = [image_bytes(value, start) for value in images_of(row)]
        for frame in frames_of(row, options, start):
            buffer = io.BytesIO()
            frame.save(buffer, "JPEG", quality=JPEG_QUALITY)
            images.append(buffer.getvalue())
        return {"images": [{"bytes": data, "path": None} for data in images]}

    states = []  # of the files, so that no frames of an older file are found in the cache
    for row in read.select_columns([name for name in (*VIDEO_COLUMNS, FOLDER) if name in read.column_names]):
        for value in videos_of(row):
            path = value.get("path") if isinstance(value, Mapping) else value
            if isinstance(path, str) and (file := folder_of(row, root) / path).is_file():
                states.append((path, file.stat().st_size, file.stat().st_mtime_ns))
    with PartialState().local_main_process_first():
        images = read.map(
            fill,
            remove_columns=read.column_names,
            features=Features({"images": List(Image(decode=False))}),
            writer_batch_size=FRAMES_IN_MEMORY,
            new_fingerprint=Hasher.hash([dataset._fingerprint, options, str(root), states]),
            desc="images and frames of videos",
        )
    return concatenate_datasets([dataset.remove_columns(shown), images], axis=1)


def _are_several(dataset: Dataset | IterableDataset, keys: Keys = KEYS) -> bool:
    """Whether a row may have several images: they are in `images` then, which TRL looks for in a batch's first row."""
    names = dataset.column_names
    name = keys.image[0] if keys != KEYS and len(keys.image) == 1 else "image"
    if names is None or name not in names or name == "images" or ("images" in names and keys.image == KEYS.image):
        return True
    if {*VIDEO_COLUMNS, *keys.video, *FURTHER_IMAGES} & set(names):
        return True
    return isinstance((dataset.features or {}).get(name), List | Json)


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
            return {**ready_row(row, options, several), PLACE: row[PLACE], UNREADABLE: None}
        except (DataError, RewardError) as error:
            return {PLACE: row[PLACE], UNREADABLE: str(error).rstrip(".")}

    sieve = Sieve(split, lambda row: row[UNREADABLE], on_skipped)

    def usable(rows: IterableDataset) -> IterableDataset:
        ready = rows.map(prepare, remove_columns=list(GONE))
        return ready.filter(lambda row: sieve.keeps(row, row[PLACE])).remove_columns([PLACE, UNREADABLE])

    # Without the old columns, a map keeps those that have another name now.
    numbered = rows.map(number, with_indices=True, remove_columns=list(first))
    sieve.require_row(usable(numbered))
    if seed is not None:
        numbered = numbered.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return usable(numbered)


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


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    length_of: Callable[[Mapping[str, Any]], int],
    limit: int,
    name: str = "train",
    on_dropped: Callable[[], None] = lambda: None,
) -> Dataset | IterableDataset:
    """Return `dataset` without the rows whose prompt has more than `limit` tokens: truncation would cut image tokens.

    A `Dataset` is measured once, at the start, and what was left out is logged; a stream is measured as it is read.

    Args:
        length_of: tokens of a row's prompt, image tokens included.
        limit: `max_prompt_length`, in tokens.
        on_dropped: called for each row that a stream leaves out.

    Raises:
        DataError: no row is within the limit.
    """
    if isinstance(dataset, IterableDataset):

        def keep(row: Mapping[str, Any]) -> bool:
            fits = length_of(row) <= limit
            if not fits:
                on_dropped()
            return fits

        return dataset.filter(keep)

    lengths = scan(dataset, length_of, f"prompt lengths ({name})")
    hint = "; --max_short_side or --max_pixels reduces images" if image_columns(dataset) else ""
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    if not kept:
        shortest = f"the shortest prompt of the {name} data has {min(lengths, default=0)} tokens"
        raise DataError(f"max_prompt_length={limit} leaves no row: {shortest}. Raise it{hint}.")
    rows = f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data"
    if len(kept) < len(dataset) and PartialState().is_main_process:
        longest = f"the longest prompt has {max(lengths)} tokens{hint}"
        logger.warning(f"max_prompt_length={limit}: left out {rows} ({longest}).")
    return dataset.select(kept)
