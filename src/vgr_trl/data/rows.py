"""A row of the user's data, as training reads it."""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, Features, Image, IterableDataset, Json, List, concatenate_datasets
from datasets.fingerprint import Hasher
from pyarrow import compute
from tqdm.auto import tqdm
from transformers.utils import logging

from vgr_trl.data.columns import (
    DIALOGUES,
    FOLDER,
    IMAGE_COLUMNS,
    KEYS,
    NUMBERED_IMAGES,
    PLACE,
    UNREADABLE,
    VIDEO_COLUMNS,
    Keys,
    Text,
    decoded,
    folder_of,
    image_columns,
    images_in,
    is_media,
    read_row,
    read_text,
    renamed,
    renamed_row,
    require_columns,
    undecoded,
    video_columns,
    videos_of,
    with_column,
)
from vgr_trl.data.images import (
    ANY_SIZE,
    DEFAULT_VIDEO_OPTIONS,
    ImageRule,
    VideoOptions,
    boxes_of,
    frames_of,
    image_bytes,
    open_image,
    show_rows,
    without_video_marks,
)
from vgr_trl.data.prompts import (
    SYSTEM_PROMPT,
    QuestionTemplate,
    SystemTemplate,
    as_parts,
    build_prompt,
    placed,
    special_problem,
    system_message,
    texts_of,
)
from vgr_trl.utils import DataError, RewardError

# ---------------------------------------------------------------------------------------------------------------------
# The frames of a data set's videos, and images in numbered columns, as its column `images`.


ROWS_IN_MEMORY = 8  # frames are large; the rest waits in the cache file
JPEG_QUALITY = 95


def with_joined_images(dataset: Dataset, options: VideoOptions, root: Path = Path()) -> Dataset:
    """Return `dataset` with its numbered images, and the frames of its videos as JPEG, in order in the column `images`.

    They are written to the cache of `datasets`, where there is one, by one process of each machine.

    Args:
        dataset: with undecoded images and videos that can be read.
    """
    columns = video_columns(dataset.column_names)
    if not columns and not set(NUMBERED_IMAGES) & set(dataset.column_names):
        return dataset
    known = (*IMAGE_COLUMNS, *NUMBERED_IMAGES, *VIDEO_COLUMNS)
    shown = [name for name in known if name in dataset.column_names]
    folder = [FOLDER] if FOLDER in dataset.column_names else []

    def fill(row: Mapping[str, Any]) -> dict[str, Any]:
        start = folder_of(row, root)
        frames = [{"bytes": _encoded(frame), "path": None} for frame in frames_of(row, options, start)]
        return {"images": [*({"bytes": image_bytes(value, start), "path": None} for value in images_in(row)), *frames]}

    state = PartialState()
    with state.local_main_process_first():
        frames = dataset.select_columns([*shown, *folder]).map(
            fill,
            remove_columns=[*shown, *folder],
            features=Features({"images": List(Image(decode=False))}),
            writer_batch_size=ROWS_IN_MEMORY,
            new_fingerprint=_fingerprint(dataset, options, root, columns),
            desc="images and frames of videos",
        )
    return concatenate_datasets([dataset.remove_columns(shown), frames], axis=1)


def with_whole_paths(dataset: Dataset, root: Path) -> Dataset:
    """Return `dataset` with images that are paths alone as whole paths: `datasets` would read them from elsewhere."""
    names = [name for name in IMAGE_COLUMNS if is_media(dataset.features.get(name)) and _has_paths(dataset, name)]

    def fill(row: Mapping[str, Any]) -> dict[str, Any]:
        start = folder_of(row, root)
        return {name: _whole(row[name], start) for name in names}

    return dataset.map(fill, features=dataset.features, desc="paths of images") if names else dataset


def _has_paths(dataset: Dataset, name: str) -> bool:
    column = dataset.data.column(name)
    while pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        column = compute.list_flatten(column)
    stored = column.drop_null()
    return bool(compute.any(compute.is_null(compute.struct_field(stored, "bytes"))).as_py())


def _whole(value: Any, start: Path) -> Any:
    if isinstance(value, list):
        return [_whole(one, start) for one in value]
    if value is None or value["bytes"] is not None or value["path"] is None:
        return value
    return {"bytes": None, "path": str(start / value["path"])}


def _encoded(frame: Any) -> bytes:
    buffer = io.BytesIO()
    frame.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _fingerprint(dataset: Dataset, options: VideoOptions, root: Path, columns: list[str]) -> str:
    """A name for the result that changes with the files too, so that no frames of an older file are found."""
    states = []
    for row in dataset.select_columns(columns):
        for value in videos_of(row):
            path = value.get("path") if isinstance(value, Mapping) else value
            if isinstance(path, str) and (root / path).is_file():
                state = (root / path).stat()
                states.append((path, state.st_size, state.st_mtime_ns))
    return str(Hasher.hash([dataset._fingerprint, options.fps, options.max_frames, str(root), states]))


# ---------------------------------------------------------------------------------------------------------------------
# Looking at every row of a data set once, the work spread over the processes.


Found = TypeVar("Found")


def scan(dataset: Dataset, examine: Callable[[Mapping[str, Any]], Found], description: str) -> list[Found]:
    """Return `examine(row)` of every row, in order, on every process.

    Each process examines its share; an exception on one is raised on all, so that none waits for another.

    Raises:
        DataError: examining a row failed, with the exception's words.
    """
    state = PartialState()
    share = range(state.process_index, len(dataset), state.num_processes)
    found: list[tuple[int, Found]] = []
    failure: str | None = None
    try:
        bar = tqdm(share, desc=description, delay=3, disable=not state.is_local_main_process)
        found = [(index, examine(dataset[index])) for index in bar]
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if state.num_processes == 1:
            raise
    shares = gather_object([(found, failure)])
    for _, other in shares:
        if other is not None:
            raise DataError(f"{description} failed: {other}")
    results = dict(pair for pairs, _ in shares for pair in pairs)
    return [results[index] for index in range(len(dataset))]


# ---------------------------------------------------------------------------------------------------------------------
# Rows whose prompt is too long are left out, never truncated: truncation would cut image tokens.


logger = logging.get_logger(__name__)


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    length_of: Callable[[Mapping[str, Any]], int],
    limit: int,
    name: str = "train",
    on_dropped: Callable[[], None] = lambda: None,
) -> Dataset | IterableDataset:
    """Return `dataset` without the rows whose prompt has more than `limit` tokens.

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
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    if not kept:
        raise DataError(
            f"Every one of the {len(dataset)} rows of the {name} data has more than max_prompt_length={limit} tokens "
            f"(the shortest prompt has {min(lengths, default=0)}): raise max_prompt_length or use smaller images."
        )
    if len(kept) == len(dataset):
        return dataset
    if PartialState().is_main_process:
        logger.warning(
            f"max_prompt_length={limit}: left out {len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data "
            f"(the longest prompt has {max(lengths)} tokens)."
        )
    return dataset.select(kept)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that were left out, and the file that lists them.


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out."""

    split: str
    row: int
    id: Any
    reason: str


def skipped_rows(
    split: str, reasons: Sequence[str | None], ids: Sequence[Any] | None = None, places: Sequence[int] | None = None
) -> list[SkippedRow]:
    """Return the rows that something speaks against.

    Args:
        reasons: why each row of the split cannot be used, None where it can.
        ids, places: of the rows; None: where they stand.

    Raises:
        DataError: no row is left.
    """
    places = range(len(reasons)) if places is None else places
    ids = places if ids is None else ids
    skipped = [
        SkippedRow(split, places[row], ids[row], reason) for row, reason in enumerate(reasons) if reason is not None
    ]
    if len(skipped) == len(reasons):
        raise DataError(
            f"None of the {len(reasons)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    return skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path) -> None:
    """Write the rows left out to `path`, one JSON object per line, and warn with the count and the first reason."""
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_json_line(row) for row in skipped), encoding="utf-8")
    logger.warning(
        f"Left out {len(skipped)} rows that cannot be used, listed with their reasons in {path}; the first: "
        f"{skipped[0].split} row {skipped[0].row}: {skipped[0].reason}."
    )


def append_skipped(row: SkippedRow, path: Path) -> None:
    """Add a row that a stream left out to `path`, and warn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_json_line(row))
    logger.warning(f"Left out {row.split} row {row.row}, listed in {path}: {row.reason}.")


def _json_line(row: SkippedRow) -> str:
    return json.dumps(asdict(row), default=str) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# A stream of rows, from which those that cannot be used are left out as it is read.


SHUFFLE_BUFFER = 1000  # rows of a stream that wait, their images undecoded


def prepare_stream(
    dataset: IterableDataset,
    split: str,
    needs_solution: bool,
    keys: Keys,
    examine: Callable[[Mapping[str, Any]], str | None],
    ready: Callable[[Mapping[str, Any]], dict[str, Any]],
    gone: Sequence[str],
    on_skipped: Callable[[SkippedRow], None] | None,
    shuffle_seed: int | None,
) -> IterableDataset:
    """Return `dataset` with its rows made ready, and without those that cannot be used.

    Args:
        examine: tells why an undecoded row cannot be used, None if it can.
        ready: makes a usable undecoded row ready.
        gone: columns that a ready row does not have, unless it has them anew.
        on_skipped: called once for each row that is left out; None: a warning.
        shuffle_seed: draw each row from the next `SHUFFLE_BUFFER`, undecoded; None: keep the order.

    Raises:
        DataError: the stream has no rows, lacks the needed columns, or no row can be used.
    """
    first = next(iter(undecoded(dataset)), None)
    if first is None:
        raise DataError(f"The {split} stream has no rows: give a data set with at least one.")
    first = next((row for row in undecoded(dataset) if row.get(UNREADABLE) is None), first)
    if first.get(UNREADABLE) is None:
        require_columns(first, split, needs_solution, keys, dataset.features)
    sieve = Sieve(split, examine, on_skipped)

    def usable(row: Mapping[str, Any]) -> bool:
        return sieve.keeps(row, row[PLACE])

    # Without the old columns, a map keeps those that have another name now.
    numbered = undecoded(dataset).map(partial(_numbered, keys=keys), with_indices=True, remove_columns=list(first))
    sieve.require_row(numbered.filter(usable))
    if shuffle_seed is not None:
        numbered = numbered.shuffle(seed=shuffle_seed, buffer_size=SHUFFLE_BUFFER)
    return numbered.filter(usable).map(ready, remove_columns=list(gone))


class Sieve:
    """What rows of a stream are left out by, each told once however often the stream is read.

    Args:
        split: its name, for messages.
        examine, on_skipped: as in `prepare_stream`.
    """

    def __init__(
        self,
        split: str,
        examine: Callable[[Mapping[str, Any]], str | None],
        on_skipped: Callable[[SkippedRow], None] | None = None,
    ) -> None:
        self.split, self.examine, self.on_skipped = split, examine, on_skipped
        self._heard: set[Any] = set()

    def keeps(self, row: Mapping[str, Any], index: int) -> bool:
        """Return whether `row` can be used; tell that the row at the place `index` is left out otherwise."""
        reason = self.examine(row)
        if reason is None:
            return True
        name = index if row.get("id") is None else (str(row["id"]), reason)  # the place changes with the files' order
        if name not in self._heard:
            self._heard.add(name)
            if self.on_skipped is not None:
                self.on_skipped(SkippedRow(self.split, index, row.get("id"), reason))
            else:
                logger.warning(f"Left out {self.split} row {index} of the stream: {reason}.")
        return False

    def require_row(self, kept: IterableDataset) -> None:
        """Raise `DataError` if `kept`, what is left of the stream, has no row."""
        if next(iter(kept), None) is None:
            raise DataError(
                f"None of the {len(self._heard)} rows of the {self.split} stream can be used: see the reasons above."
            )


def _numbered(row: Mapping[str, Any], index: int, keys: Keys) -> dict[str, Any]:
    return {**renamed_row(row, keys), PLACE: index}


# ---------------------------------------------------------------------------------------------------------------------
# What a row needs before it can be trained on, and why a row is left out.
#
# A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
# choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone; or it is laid out
# as
# `layouts.py` knows, or has other names for these that flags give (`naming.py`).


GONE = (*IMAGE_COLUMNS, *NUMBERED_IMAGES, *VIDEO_COLUMNS, *DIALOGUES, PLACE, FOLDER, UNREADABLE)


def row_problem(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = None,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    special: re.Pattern[str] | None = None,
    images: ImageRule = ANY_SIZE,
    boxes: bool = False,
) -> str | None:
    """Return why `row` cannot be used, in one sentence, or None if it can.

    Args:
        row: with undecoded or decoded images.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; a template may fail on the row.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.
        images: whether large images are left out.
        boxes: whether something reads the boxes of rows with one image.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    try:
        reading = read_row(row, needs_answer=needs_solution)
        _conversation(row, reading, system_prompt)
        if (problem := special_problem(special, _conversation(row, reading, None))) is not None:
            return problem
        shown = [open_image(value, folder_of(row, root)) for value in reading.images]
        for image in shown:
            images.check(image)
        shown += frames_of(row, videos, folder_of(row, root))
        if boxes and len(shown) == 1:
            boxes_of(row, images.limits.size_of(*shown[0].size), "it")
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")
    return None


def ready_row(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    several: bool = True,
    images: ImageRule = ANY_SIZE,
) -> dict[str, Any]:
    """Return a row in which `row_problem` finds nothing with its prompt and its images, those of videos included.

    Args:
        row: with undecoded or decoded images.
        several: whether there may be several images, which are then in `images`, in every row alike.
    """
    text, root = read_text(row), folder_of(row, root)
    ready = {name: value for name, value in row.items() if name not in GONE}
    ready["prompt"] = placed(_conversation(row, text, system_prompt))
    ready |= {name: value for name, value in _stated(text).items() if value is not None or name in row}
    opened = [open_image(value, root) for value in images_in(row)] + frames_of(row, videos, root)
    shown = [images.fitted(image) for image in opened]
    return ready | ({"images": shown} if several else {"image": shown[0] if shown else None})


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    on_skipped: Callable[[SkippedRow], None] | None = None,
    shuffle_seed: int | None = None,
    special: re.Pattern[str] | None = None,
    keys: Keys = KEYS,
    images: ImageRule = ANY_SIZE,
    boxes: bool = False,
) -> tuple[Dataset | IterableDataset, list[SkippedRow]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Every image is decoded once to see whether it can be, each process looking at its share. Of a stream the rows are
    checked as they are read: the list is empty, and `on_skipped` hears of each row once. Videos become images: of a
    data set with a column `video` or `videos`, each row has its images and then its frames in `images`.

    Args:
        dataset: rows as described at the top of this file.
        needs_solution: whether a row must have a usable `solution` or `label_idx`.
        system_prompt: put before each `problem`; rows with a `prompt` of their own keep it.
        on_skipped: called for each row of a stream that is left out; None: a warning.
        shuffle_seed: of a stream: draw each row from the next 1000, which wait with their images undecoded, in a
            small part of the memory that shuffling the result takes. None: keep the order.
        boxes: whether something reads the boxes of rows, so that rows with a bad one are left out.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    options: dict[str, Any] = {"root": root, "system_prompt": system_prompt, "videos": videos, "images": images}
    examine = partial(row_problem, needs_solution=needs_solution, special=special, boxes=boxes, **options)
    if isinstance(dataset, IterableDataset):
        ready = partial(ready_row, several=_are_several(dataset, keys), **options)
        stream = prepare_stream(dataset, split, needs_solution, keys, examine, ready, GONE, on_skipped, shuffle_seed)
        return stream, []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    dataset = undecoded(dataset)
    if dataset.column_names != [UNREADABLE]:
        require_columns(_first(dataset), split, needs_solution, keys, dataset.features)
    dataset = renamed(dataset, keys)
    reasons = scan(dataset, examine, f"check rows ({split})")
    skipped = skipped_rows(split, reasons, dataset["id"] if "id" in dataset.column_names else None)
    if any(not is_media(dataset.features[name]) for name in image_columns(dataset)):  # files, which may go
        dataset = dataset.add_column(PLACE, list(range(len(dataset))))
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    dataset = with_whole_paths(with_joined_images(_with_texts(dataset, system_prompt), videos, root), root)
    dataset = dataset.remove_columns([name for name in (UNREADABLE, *DIALOGUES) if name in dataset.column_names])
    column = "images" if _are_several(dataset) else "image"
    shown = partial(show_rows, split=split, root=root, column=column, images=images)
    return decoded(dataset).with_transform(shown), skipped


def _first(dataset: Dataset) -> dict[str, Any]:
    """The first row that could be read, else the first."""
    if UNREADABLE not in dataset.column_names:
        return dict(dataset[0])
    place = next((row for row, reason in enumerate(dataset[UNREADABLE]) if reason is None), 0)
    return dict(dataset[place])


def _conversation(
    row: Mapping[str, Any], text: Text, system_prompt: str | SystemTemplate | None
) -> list[dict[str, Any]]:
    source = row.get("source") if isinstance(row.get("source"), str) else None
    if isinstance(system_prompt, QuestionTemplate) and not isinstance(text.prompt, str):
        raise DataError(f"its question is a conversation, which {system_prompt.name} cannot be filled in with")
    if isinstance(text.prompt, str):
        prompt = build_prompt(text.prompt, text.choices, system_prompt=system_prompt, source=source)
    elif text.is_whole:
        prompt = text.prompt
    else:
        asked = " ".join(texts_of(text.prompt[-1:]))
        prompt = [*system_message(system_prompt, asked, text.choices, source), *text.prompt]
    return without_video_marks(prompt) if any(row.get(name) is not None for name in VIDEO_COLUMNS) else prompt


def _stated(text: Text) -> dict[str, Any]:
    """Options and answer of a row under the names that rewards know them by."""
    return {"choices": text.choices, "solution": text.answer}


def _with_texts(dataset: Dataset, system_prompt: str | SystemTemplate | None) -> Dataset:
    names = {*KEYS.prompt, *KEYS.choices, *KEYS.answer, *NUMBERED_IMAGES, *VIDEO_COLUMNS, "label", "source"}
    if "subject" in dataset.column_names:
        names |= {"image", "subject"}  # which tell rows of MMMU-Pro
    conversations, stated = [], []
    for row in dataset.select_columns(sorted(names & set(dataset.column_names))):
        text = read_text(row)
        conversations.append(_conversation(row, text, system_prompt))
        stated.append(_stated(text))
    if not all(isinstance(message["content"], str) for messages in conversations for message in messages):
        conversations = [
            [{**message, "content": as_parts(message["content"])} for message in messages] for messages in conversations
        ]
    for name in ("choices", "solution"):
        values = [row[name] for row in stated]
        if values != (list(dataset[name]) if name in dataset.column_names else [None] * len(values)):
            dataset = with_column(dataset, name, values)
    return with_column(dataset, "prompt", conversations)


def _are_several(dataset: Dataset | IterableDataset, keys: Keys = KEYS) -> bool:
    """Whether a row may have several images: they are in `images` then, which TRL looks for in a batch's first row."""
    names = dataset.column_names
    name = keys.image[0] if keys != KEYS and len(keys.image) == 1 else "image"
    if names is None or name not in names or name == "images" or ("images" in names and keys.image == KEYS.image):
        return True
    if video_columns(names) or set(keys.video) & set(names):
        return True
    return isinstance((dataset.features or {}).get(name), List | Json)
