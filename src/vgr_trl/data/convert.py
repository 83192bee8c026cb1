"""Convert public question sets, by name, to rows that `read_row` understands, and merge several sets."""

import hashlib
import io
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from itertools import combinations
from pathlib import Path
from random import Random
from shutil import ignore_patterns
from tempfile import TemporaryDirectory
from typing import Any, cast

from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from vgr_trl import registries
from vgr_trl.data.checked_rows import REASON, map_rows
from vgr_trl.data.images import (
    BOX_COLUMNS,
    FOLDER,
    MEDIA,
    ImageLimits,
    boxes_of,
    folder_of,
    image_bytes,
    image_size,
    images_of,
    path_within,
    read_image,
    to_rgb,
    videos_of,
)
from vgr_trl.data.inspect import report
from vgr_trl.data.load import MMMU_PRO, readable, row_files
from vgr_trl.data.prompts import SIZES, texts_of
from vgr_trl.data.read_row import (
    KEYS,
    UNREADABLE,
    Keys,
    drop_empty_choices,
    is_vision_only,
    list_of,
    read_row,
    reason_of,
    renamed_row,
    text_of,
    undecoded,
    value_of,
)
from vgr_trl.errors import ConfigError, DataError, MissingIdsError, RewardError
from vgr_trl.options import check_value
from vgr_trl.rewards.answers import LETTERS, resolve_solution
from vgr_trl.rewards.phrases import normalise

HUB_NAME = "HuggingFaceM4/A-OKVQA"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Converter:
    """Conversion of a data set, with the default source `hub_name`, `config` and `split`."""

    rows: Callable[[Row], Iterable[Row]]  # published row → rows with columns that `read_row` knows
    several_images: bool = False  # whether a question may have any number of images: `images`, not `image`
    regions: bool = False  # whether boxes mark the part of the image that a question is about
    id_column: str = "id"  # rows without an id get their number
    hub_name: str | None = None
    config: str | None = None
    split: str = "train"
    join: Callable[[Callable[[str], Dataset]], Dataset] | None = None  # makes one table of several configurations


def _multiple_choice(row: Row, source: str) -> list[Row]:
    """Return a row with options, or a vision-only row of MMMU-Pro, or raise `DataError` for a row without options."""
    if is_vision_only(row):
        return [{**row, "source": f"{source} vision"}]
    if value_of(drop_empty_choices(row), *KEYS["choices"]) is None:
        raise DataError("it has no options")
    return [{**row, "source": source}]


def join_arxivqa(load: Callable[[str], Dataset]) -> Dataset:
    """Return the questions of ArxivQA as VisRAG publishes it, in the order of their figures.

    The tables are `corpus` (`corpus-id`, `image`), `queries` (`query-id`, `query`, `options`, `answer`) and `qrels`
    (`query-id`, `corpus-id`, `score`), which says which figure a question is about.
    """
    corpus, queries, qrels = load("corpus"), load("queries"), load("qrels")
    place = {str(name): number for number, name in enumerate(corpus["corpus-id"])}
    figures = defaultdict[str, set[int | None]](set)
    for row in qrels:
        if row.get("score") != 0:
            figures[str(row["query-id"])].add(place.get(str(row["corpus-id"])))
    names = [str(name) for name in queries["query-id"]]
    times = Counter(names)
    places = [next(iter(figures[name])) if len(figures[name]) == times[name] == 1 else None for name in names]
    reason = "its query-id occurs twice, or it does not have exactly one figure in qrels and corpus"
    queries = queries.add_column(UNREADABLE, [reason if number is None else None for number in places])
    order = sorted(range(len(places)), key=lambda query: (places[query] is None, places[query]))
    shown = corpus.select_columns(["image"]).select([places[query] or 0 for query in order])
    return concatenate_datasets([queries.select(order), shown], axis=1)


def _easy_vqa(row: Row) -> Iterator[Row]:
    """Yield the questions of easy-VQA, several to an image: `image_id`, `image`, and lists `questions`, `answers`."""
    asked, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(asked) != len(answers) or not asked:
        raise DataError(f"it has {len(asked)} questions and {len(answers)} answers: the numbers must be equal")
    for number, (question, answer) in enumerate(zip(asked, answers, strict=True)):
        about = {"id": f"{row.get('image_id')}-{number}", "source": "easy-VQA", "image": row.get("image")}
        yield {**about, "question": question, "answer": answer}


def _nlvr(row: Row) -> list[Row]:
    """Return the question of a row of Cornell NLVR: `identifier`, `image`, `sentence`, `label`, JSON `objects`."""
    try:
        boxes = [item["box"] for item in json.loads(row["objects"])]
    except (ValueError, TypeError, KeyError):
        boxes = []  # there are none in the training split
    question = f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}"
    about = {"id": row.get("identifier"), "source": "NLVR", "image": row.get("image"), "regions": boxes}
    answer = str(row.get("label")).lower()
    return [{**about, "question": question, "choices": ["true", "false"], "answer": answer}]


# fmt: off
CONVERTERS = {
    "aokvqa": Converter(partial(_multiple_choice, source="A-OKVQA"), hub_name=HUB_NAME, id_column="question_id"),
    "arxivqa": Converter(partial(_multiple_choice, source="ArxivQA"), hub_name="openbmb/VisRAG-Ret-Test-ArxivQA",
        id_column="query-id", join=join_arxivqa),
    "mmmu_pro": Converter(partial(_multiple_choice, source="MMMU-Pro"), several_images=True, hub_name=MMMU_PRO[0],
        config=MMMU_PRO[1], split="test"),
    "jsonl": Converter(lambda row: [row], several_images=True),
    "easy_vqa": Converter(_easy_vqa),
    "nlvr": Converter(_nlvr, regions=True),
}
# fmt: on
for _name, _converter in CONVERTERS.items():
    registries.datasets.register(_name)(_converter.rows)


def load_converter(spec: str) -> Converter:
    """Return a converter by its name in `CONVERTERS`, or for the name, dotted path or file of a function.

    The function maps a published row to rows. Its attribute `converter`, a dict, has arguments of its `Converter`.
    """
    if spec in CONVERTERS:
        return CONVERTERS[spec]
    rows = registries.datasets.load(spec)
    return Converter(rows, **vars(rows).get("converter", {}))


def read_ids(path: Path) -> frozenset[str]:
    """Return the ids in a file, a text with an id per line, or a JSON list."""
    text = path.read_text(encoding="utf-8-sig").strip()
    ids = json.loads(text) if text.startswith("[") else text.splitlines()
    return frozenset(str(value).strip() for value in ids) - {""}


# Words that mean other options by their place or letter. Such options stay where they are, and so does a question that
# names options by letter.
_PLACES = re.compile(r"\b(above|below|preceding|previous|following|former|latter|first|second|last)\b", re.IGNORECASE)
_LETTERS = re.compile(
    r"^\W*[A-J]\W*$"
    r"|\b[A-J]\)?\s*(?:,|&|/|and|or|nor)\s*\(?[A-J]\b"
    r"|\b(?:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-J]\b"
)
_OPTION_LETTER = re.compile(r"\b(?:options?|choices?|answers?)\s+\(?[A-J]\b")


def shuffle_choices(rows: Dataset, sides: Iterable[Sequence[int]], seed: int) -> Dataset:
    """Shuffle the options of converted rows, unless their order has a meaning.

    Among every n questions with n options in a side, each letter is right once.

    Args:
        rows: converted rows.
        sides: numbers of the rows of each split.
        seed: seed of the order.
    """
    solutions, options, problems = list(rows["solution"]), list(rows["choices"]), list(rows["problem"])
    for side in sides:
        random, places = Random(f"choices {seed}"), defaultdict[int, list[int]](list)  # unused places of right options
        for row in side:
            if options[row] and not stays_in_order(problems[row], options[row]):
                options_left, waiting = list(options[row]), places[len(options[row])]
                right = options_left.pop(_right_options(solutions[row], options_left)[0])
                random.shuffle(options_left)
                if not waiting:
                    waiting.extend(range(len(options[row])))
                    random.shuffle(waiting)
                place = waiting.pop()
                options[row] = [*options_left[:place], right, *options_left[place:]]
                solutions[row] = LETTERS[place] if solutions[row] in LETTERS else solutions[row]  # a list has texts
    for name, values in {"choices": options, "solution": solutions}.items():
        rows = rows.remove_columns(name).add_column(name, values, feature=rows.features[name])
    return rows


def _right_options(solution: str, choices: Sequence[str]) -> list[int]:
    """Return the indices of the accepted options in a converted row: one for a letter, several for a list."""
    right = resolve_solution(solution, choices)
    return [int(answer.index or 0) for answer in (right, *right.others) if choices]


def stays_in_order(problem: str, choices: Iterable[str]) -> bool:
    """Return whether the question or an option refers to options by their place or letter."""
    names_options = any(_PLACES.search(choice) or _LETTERS.search(choice) for choice in choices)
    return names_options or _OPTION_LETTER.search(problem) is not None


KEPT = ("JPEG", "PNG", "WEBP")  # formats whose files are stored as they are
ENCODING: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {"compress_level": 3}}
ROWS_PER_FILE = 2000
ROW_GROUP_ROWS = 100  # rows that a stream reads at a time
REPORT, SKIPPED, REPLACED = "report.txt", "skipped.jsonl", "replaced"
DIGESTS, ROW = "__digests__", "__row__"
SCHEMA = Features(
    {name: Value("string") for name in ("id", "source", "problem", "solution")}
    | {"choices": List(Value("string")), "image": ImageFeature(), "images": List(ImageFeature())}
    | {"videos": List(Value("string")), "regions": List(List(Value("float32")))}
)
ABOUT = {REASON: Value("string"), "file": Value("string"), ROW: Value("int64")}
ABOUT |= {SIZES: List(List(Value("int32"))), DIGESTS: List(Value("string"))}


@dataclass(frozen=True)
class Rules:
    """Rules for reading and converting the rows of a set, which messages and ids call `file`."""

    converter: Converter
    file: str
    keys: Keys = field(default_factory=lambda: KEYS)
    root: Path = Path()  # relative image and video paths start here and may not leave it
    limits: ImageLimits = field(default_factory=ImageLimits)
    ids: frozenset[str] | None = None  # IDs of the rows to convert; None: all rows
    most: int | None = None  # usable rows to convert; None: all
    hashes: bool = False  # whether to hash pixels and video files


def columns_of(sets: Sequence[tuple[Dataset, Rules]], several_images: bool) -> list[str]:
    """Return the columns of converted rows of all sets, as `datasets` loads only splits with the same columns."""
    names = {name for rows, _ in sets for name in rows.column_names}
    has_videos = not names.isdisjoint(name for _, rules in sets for name in rules.keys["video"])
    has_boxes = not names.isdisjoint(BOX_COLUMNS) or any(rules.converter.regions for _, rules in sets)
    has = {"image": not several_images, "images": several_images, "videos": has_videos, "regions": has_boxes}
    return [name for name in SCHEMA if has.get(name, True)]


def has_one_image(rows: Dataset) -> bool:
    """Return whether the columns show that each row has at most one image."""
    names = {name for name in rows.column_names if name.startswith("image")}
    return names == {"image"} and isinstance(rows.features["image"], ImageFeature | Value)


def convert_rows(rows: Dataset, rules: Rules, columns: Sequence[str], folder: str | Path, workers: int) -> Dataset:
    """Return the rows with columns of the schema, or with the `REASON` why they cannot be used.

    Args:
        rows: rows of a set.
        rules: rules of the set.
        columns: columns of the schema.
        folder: folder for temporary files.
        workers: processes that decode images; 0: this process.

    Raises:
        MissingIdsError: no row has one of the ids.
        DataError: the source cannot be read.
    """
    features = Features({name: SCHEMA[name] for name in columns} | ABOUT)
    places: Sequence[int] = list(range(len(rows)))
    column = next((name for name in (rules.converter.id_column, "id") if name in rows.column_names), None)
    if rules.ids is not None and column is not None:
        places = [place for place, name in enumerate(rows[column]) if str(name) in rules.ids]
    if not places:
        raise MissingIdsError(f"None of the ids is in {rules.file}: check the file of ids.")
    if rules.most is not None:  # the usable rows are counted, so one process gets all; only lists are divided
        workers, places = 0, tuple(places)
    arguments = {"rows": undecoded(rows), "rules": rules, "columns": tuple(features), "places": places}
    options = {"cache_dir": str(folder), "fingerprint": rows._fingerprint, "num_proc": workers or None}
    with readable(rules.file, "the source"):
        try:
            return cast("Dataset", Dataset.from_generator(_convert, features, gen_kwargs=arguments, **options))
        except Exception as error:  # `datasets` hides Ctrl-C behind the time-out of its workers
            raise (hidden if isinstance(hidden := error.__context__, KeyboardInterrupt) else error) from error.__cause__


def _convert(places: Sequence[int], rows: Dataset, rules: Rules, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the questions of the rows with these numbers, or the reason why a row has none."""
    usable = 0
    for place in places:
        row = renamed_row(rows[place], rules.keys)
        try:
            parts = [row] if row.get(UNREADABLE) is not None else list(rules.converter.rows(row))
        except (DataError, RewardError) as error:
            parts = [{UNREADABLE: reason_of(error)}]
        for part in parts:
            name = value_of({**row, **part}, rules.converter.id_column, "id")
            name = f"{Path(rules.file).name}-{place}" if name in (None, "") else str(name)
            if rules.ids is not None and name not in rules.ids:
                continue
            try:
                made = to_schema(part, rules)
            except (DataError, RewardError) as error:
                made = {REASON: reason_of(error)}
            made |= {"id": name, "file": rules.file, ROW: place}
            yield {column: made.get(column) for column in columns}
            usable += REASON not in made
            if usable == rules.most:
                return


def to_schema(row: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Convert a row that `read_row` understands to the schema, or raise `DataError` or `RewardError`."""
    question, root = read_row(row), rules.root
    prompt: Any = question.prompt
    if not isinstance(prompt, str) and (len(prompt) != 1 or prompt[0]["role"] != "user"):
        raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
    problem = text_of({"content": prompt} if isinstance(prompt, str) else prompt[0], "content")
    count, right = len(question.images), question.right
    if count != 1 and not rules.converter.several_images:
        raise DataError(f"it has {count} images, where one is expected")
    boxes = boxes_of(row, image_size(question.images[0], root), "it") if count == 1 else []
    videos = [_video_path(value, root) for value in question.videos]
    encoded = [encode_image(value, root, rules.limits) for value in question.images]
    files = [{"bytes": data, "path": None} for data, _ in encoded]
    contents = [f"{image.size} ".encode() + image.tobytes() for _, image in encoded if rules.hashes]
    contents += [Path(path).read_bytes() for path in videos if rules.hashes]
    assert right is not None
    solution = right.text if right.index is None else LETTERS[right.index]
    if right.others:
        solution = json.dumps([answer.text for answer in (right, *right.others)], ensure_ascii=False)
    if right.index is not None:
        resolve_solution(solution, right.choices or None)  # beside the options, its letter may be ambiguous
    return {
        "source": row["source"] if isinstance(row.get("source"), str) else Path(rules.file).stem,
        "problem": problem.strip(),
        "solution": solution,
        "choices": [choice.strip() for choice in right.choices] or None,
        "image": files[0] if count == 1 else None,
        "images": files,
        "videos": videos,
        "regions": [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes],
        SIZES: [image.size for _, image in encoded],
        DIGESTS: [hashlib.sha256(content).hexdigest() for content in contents],
    }


def _video_path(value: Any, root: Path) -> str:
    path = path_within(root, str(value.get("path") if isinstance(value, Mapping) else value)).absolute()
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise DataError(f"video file {str(path)[:200]} does not exist")
    return str(path)


def encode_image(value: Any, root: Path, limits: ImageLimits) -> tuple[bytes, Image.Image]:
    """Return an image as a file and as pixels, upright, as RGB and within the limits.

    The file of an image that needs no change keeps its bytes. A changed JPEG is written as JPEG of quality 95 without
    subsampling, any other changed image as PNG.

    Args:
        value: an image, a path, or a dict with `bytes` or `path`.
        root: folder that a relative path starts from.
        limits: limits of the size.

    Raises:
        DataError: the image cannot be used; the message is the reason.
    """
    data = b"" if isinstance(value, Image.Image) else image_bytes(value, root)
    opened = read_image({"bytes": data} if data else value, root)
    image = limits.fitted(to_rgb(opened))
    if data and image is opened and opened.format in KEPT and getattr(opened, "n_frames", 1) == 1:
        return data, image
    kind, buffer = "JPEG" if opened.format in ("JPEG", "MPO") else "PNG", io.BytesIO()
    # Without the original's colour profile and metadata.
    Image.frombytes("RGB", image.size, image.tobytes()).save(buffer, kind, **ENCODING[kind])
    return buffer.getvalue(), image


def prepare_folder(folder: Path, read: Sequence[str | None]) -> TemporaryDirectory[str]:
    """Return a new temporary folder beside the output folder of a command that reads the folders `read`.

    First restore an output that a killed command was about to replace, and remove the command's files.

    Raises:
        ConfigError: `folder` cannot be renamed, lies in one of them, or holds rows of another origin.
    """
    folder, prefix = folder.resolve(), f".{folder.resolve().name}.unfinished-"
    sources = [Path(source).resolve() for source in read if source and Path(source).is_dir()]
    if folder.is_mount() or Path.cwd().is_relative_to(folder) or any(map(folder.is_relative_to, sources)):
        wrong = "a mount point, the working folder or in a folder that is read"
        raise ConfigError(f"output_dir {folder} is {wrong}: give another.")
    for path in folder.parent.glob(f"{escape(prefix)}*"):
        if not Path("/proc", path.name.split("-")[-2]).exists():  # its process has ended
            with suppress(OSError):  # there is a folder, or there was none
                (path / REPLACED).rename(folder)
            shutil.rmtree(path, ignore_errors=True)
    for file in row_files(folder):
        is_named_so = re.fullmatch(r"\w+-\d{5}\.parquet", str(file.relative_to(folder)))
        if not is_named_so or not (folder / REPORT).exists():
            raise ConfigError(f"{folder} holds {file.name}, which this command did not write: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=folder.parent)


def write_rows(rows: Dataset, sides: Mapping[str, list[int]], columns: list[str], working: Path, folder: Path) -> str:
    """Write the rows of each split in place of an earlier result, and return the report.

    Args:
        rows: converted rows.
        sides: split → numbers of its rows.
        columns: columns to write.
        working: folder for unfinished files.
        folder: output folder, which a copy with the new files replaces when all are complete.

    Raises:
        DataError: no row is usable.
    """
    about = rows.select_columns(["source", "solution", "choices", SIZES, REASON, "file", ROW])
    folder, made = folder.resolve(), working / "made"
    left_out = [row for row in about if row[REASON] is not None]
    shutil.copytree(folder, made, symlinks=True, ignore=ignore_patterns(*(f"{split}-*.parquet" for split in sides)))
    mode = "a" if any(file.name.split("-")[0] not in sides for file in row_files(folder)) else "w"
    with ((made if any(sides.values()) else folder) / SKIPPED).open(mode, encoding="utf-8") as log:
        for row in left_out:
            log.write(json.dumps({"file": row["file"], "row": row[ROW], "reason": row[REASON]}) + "\n")
    if not any(sides.values()):
        first = left_out[0][REASON] if left_out else "there are none"
        raise DataError(f"None of the {len(rows)} rows can be used; the first: {first}. {log.name} lists them all.")
    used = {split: side for split, side in sides.items() if side}
    texts = [f"{split}: {len(side):,} rows\n{report(about.select(side))}\n" for split, side in used.items()]
    text = "\n".join([*texts, report(left_out)])
    for split, side in sides.items():
        for number, start in enumerate(range(0, len(side), ROWS_PER_FILE)):
            part = rows.select(side[start : start + ROWS_PER_FILE]).select_columns(columns)
            path = made / f"{split}-{number:05d}.parquet"
            part.to_parquet(path, batch_size=ROW_GROUP_ROWS, write_page_checksum=True)  # verified when it is loaded
    with (made / REPORT).open(mode, encoding="utf-8") as file:
        file.write(text)
    folder.rename(working / REPLACED)
    made.rename(folder)
    return text


TEST_SHARE = 0.1
DUPLICATE = "it has the same image and question as an earlier row"
CONTRADICTION = "another row with the same image and question has another answer"


def merge(rows: Dataset, test_share: float, seed: int) -> tuple[Dataset, dict[str, list[int]]]:
    """Return converted rows, duplicates with a `REASON`, and the shuffled numbers of the rows of `train` and `test`.

    The first of several rows with the same images and question stays. If two of them contradict each other, none stays,
    as the right answer is unknown.

    Args:
        rows: converted rows with `DIGESTS`.
        test_share: share of rows in `test`, in [0, 1); 0: no split.
        seed: seed of the split and the order.

    Raises:
        ConfigError: `test_share` is out of range.
        DataError: there is no way to split the rows.
    """
    check_value("test_share", test_share, float, ge=0, lt=1)
    reasons, images = list(rows[REASON]), dict[int, list[str]]()
    alike = defaultdict[Any, list[tuple[int, set[str], list[str]]]](list)  # number, right answers and options
    for number, row in enumerate(rows.select_columns(["problem", "solution", "choices", DIGESTS])):
        if reasons[number] is None:
            choices, problem = [normalise(choice) for choice in row["choices"] or ()], normalise(row["problem"])
            right = {choices[place] for place in _right_options(row["solution"], row["choices"])}
            right = right or {normalise(row["solution"])}
            images[number] = row[DIGESTS] or [problem]
            alike[(*images[number], problem)].append((number, right, choices))
    for same in alike.values():
        contradicts = any(
            answer.isdisjoint(right) and ((answer <= {*options} and right <= {*choices}) or not (choices or options))
            for (_, answer, choices), (_, right, options) in combinations(same, 2)  # both could have been chosen
        )
        for number, *_ in same if contradicts else same[1:]:
            reasons[number] = CONTRADICTION if contradicts else DUPLICATE
            del images[number]
    numbers, sides = list(images), dict[str, list[int]]()
    split = split_by_image(list(images.values()), test_share if images else 0, seed)
    for name, side in zip(("train", "test"), split, strict=True):
        sides[name] = Random(seed).sample([numbers[place] for place in side], len(side))
    rows = rows.remove_columns(REASON).add_column(REASON, reasons, feature=rows.features[REASON])
    return rows, sides


def train_test_split(
    dataset: Dataset, seed: int, root: Path = Path(), most: int | None = None
) -> tuple[Dataset, Dataset]:
    """Split prepared rows into training rows and a tenth for evaluation that share no image.

    Args:
        dataset: rows from `prepare_rows`; rows without an image are compared by their question.
        seed: seed of the choice, which depends on nothing else but the images.
        root: folder that relative paths start from.
        most: largest number of rows for evaluation; None: no limit.

    Raises:
        DataError: all rows share images.
    """
    stored = undecoded(dataset.with_format(None))
    stored = stored.select_columns([name for name in ("prompt", *MEDIA, FOLDER) if name in stored.column_names])
    features = Features({DIGESTS: List(Value("string"))})

    def examine(row: Mapping[str, Any]) -> dict[str, list[str]]:
        shown = [image_bytes(value, folder_of(row, root)) for value in (*images_of(row), *videos_of(row))]
        content = shown or ["\0".join(texts_of(row["prompt"][-1:])).encode()]
        return {DIGESTS: [hashlib.sha256(data).hexdigest() for data in content]}

    digests = list(map_rows(stored, examine, features, None, "Comparing images", root=root)[DIGESTS])
    train, test = split_by_image(digests, min(TEST_SHARE, (most or len(digests)) / len(digests)), seed)
    return dataset.select(train), dataset.select(test[:most])


def split_by_image(images: Sequence[Sequence[str]], test_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows to train on and to test on, with no image on both sides.

    Rows that share an image, also through other rows, stay together.

    Args:
        images: per row the names of its images.
        test_share: share of rows to test on, in [0, 1), which is met as closely as possible.
        seed: seed of the choice, which depends on nothing else but the images.

    Raises:
        DataError: shared images link all rows.
    """
    if test_share == 0:
        return list(range(len(images))), []
    leader: dict[str, str] = {}

    def find(image: str) -> str:
        while leader.setdefault(image, image) != image:
            leader[image] = image = leader[leader[image]]
        return image

    for first, *duplicates in images:
        for image in duplicates:
            leader[find(image)] = find(first)
    groups = defaultdict[str, list[int]](list)
    for row, of in enumerate(images):
        groups[find(of[0])].append(row)
    if len(groups) < 2:
        raise DataError(f"The {len(images)} rows cannot be split: shared images link all of them.")

    def rank(group: list[int]) -> str:
        image = min(image for row in group for image in images[row])
        return hashlib.sha256(f"{seed}\0split\0{image}".encode()).hexdigest()  # another hash would change all splits

    ranked, test = sorted(groups.values(), key=rank), set[int]()
    wanted = min(max(1, round(test_share * len(images))), len(images) - 1)
    for group in ranked:
        if len(test) + len(group) <= wanted:
            test.update(group)
    test = test or {*min(ranked, key=lambda group: len(group))}
    return [row for row in range(len(images)) if row not in test], sorted(test)
