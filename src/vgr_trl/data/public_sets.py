"""Converters of public question sets and of the user's own files, by name.

A converter reads a `Source` and yields, per row, where it was read and a `Question`, or why it is none.
"""

import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from vgr_trl import registries
from vgr_trl.data.columns import (
    KEYS,
    VISION_ONLY_PROBLEM,
    Candidate,
    Keys,
    Origin,
    Question,
    id_of,
    list_of,
    make_question,
    read_row,
    renamed_row,
    text_of,
    to_candidates,
    try_question,
    value_of,
)
from vgr_trl.data.images import ADDRESS, COLUMNS, as_shares, boxes_of, in_pixels_of_its_image, path_within, read_image
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read import Source
from vgr_trl.utils import ConfigError, DataError

HUB_NAME = "HuggingFaceM4/A-OKVQA"
ARXIVQA_HUB_NAME = "openbmb/VisRAG-Ret-Test-ArxivQA"
MMMU_PRO_HUB_NAME = "MMMU/MMMU_Pro"
HUB_CONFIG = "standard (10 options)"  # of MMMU-Pro

Rows = dict[str, tuple[Origin, Mapping[str, Any]]]


@dataclass(frozen=True)
class Converter:
    """How a data set is converted.

    Attributes:
        read: yields its questions, or why a row is none.
        several_images: whether a question may have more than one image, so that rows get `images` instead of `image`.
        regions: whether it says in boxes what a question is about.
        hub_name: read where no source is named; None: a source must be named.
        config: configuration of the hub data set that is read where none is named.
        split: read where none is named.
        count: the number of rows where it is known; None: that of the source.
    """

    read: Callable[..., Iterator[Candidate]]
    several_images: bool = False
    regions: bool = False
    hub_name: str | None = None
    config: str | None = None
    split: str = "train"
    count: Callable[[Source], int | None] = Source.count


def _each_row(questions: Callable[[Origin, Mapping[str, Any]], Iterable[Question | str]]) -> Callable[..., Any]:
    """Return a reader of a set in which every row is converted by itself."""
    return lambda source: to_candidates(source.records(), questions)


def _multiple_choice(origin: Origin, row: Mapping[str, Any], *, source: str, id_column: str) -> list[Question]:
    """A question of A-OKVQA, ArxivQA or MMMU-Pro, which `read_row` knows, with its options.

    Those of MMMU-Pro's vision-only rows stay in the image: in the text they would answer what is to be read.
    """
    reading = read_row(row)
    is_vision_only = reading.prompt == VISION_ONLY_PROBLEM
    if reading.choices is None and not is_vision_only:
        raise DataError("it has no options")
    return [
        make_question(
            id=id_of(row, origin, id_column),
            source=f"{source} vision" if is_vision_only else source,
            problem=str(reading.prompt),
            choices=reading.choices,
            answer=reading.answer,
            images=reading.images,
        )
    ]


def arxivqa_read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of ArxivQA as VisRAG publishes it, in the order of their figures, or why a row is none.

    Three tables: `corpus` (`corpus-id`, `image`), `queries` (`query-id`, `query`, `options`, `answer`) and `qrels`
    (`query-id`, `corpus-id`, and `score`), which says which figure a question is about.
    Figures are read once and one by one; questions, which are short, are kept.
    """
    queries: Rows = {}
    yield from _kept_by_id(source, "queries", "query-id", queries)
    figure_of: dict[str, str] = {}
    yield from _figures(source, queries, figure_of)
    asked: dict[str, list[str]] = defaultdict(list)
    for query_id, corpus_id in figure_of.items():
        asked[corpus_id].append(query_id)
    seen: set[str] = set()
    for origin, record in source.records("corpus"):
        if isinstance(record, str):
            yield origin, record
            continue
        try:
            corpus_id = _key(record, "corpus-id")
            if corpus_id in seen:
                raise DataError(f"its corpus-id {corpus_id[:80]!a} occurs twice: the first figure is used")
        except DataError as error:
            yield origin, str(error)
            continue
        seen.add(corpus_id)
        rows = [queries.pop(query_id) for query_id in asked.pop(corpus_id, [])]
        asked_about = [(place, {**row, "image": record.get("image")}) for place, row in rows]
        yield from to_candidates(asked_about, partial(_multiple_choice, source="ArxivQA", id_column="query-id"))
    for query_id, (origin, _) in queries.items():
        yield origin, f"its figure {figure_of[query_id][:80]!a} is not in the corpus"


def _kept_by_id(source: Source, config: str, name: str, kept: Rows) -> Iterator[Candidate]:
    """Put the rows into `kept`, and yield those that have no id of their own."""
    rows: dict[str, list[tuple[Origin, Mapping[str, Any]]]] = defaultdict(list)
    for origin, record in source.records(config):
        try:
            if isinstance(record, str):
                raise DataError(record)
            rows[_key(record, name)].append((origin, record))
        except DataError as error:
            yield origin, str(error)
    for key, same in rows.items():
        if all(record == same[0][1] for _, record in same):
            kept[key] = same.pop(0)
        for origin, _ in same:
            yield origin, f"its {name} {key[:80]!a} occurs twice"


def _figures(source: Source, queries: Rows, figure_of: dict[str, str]) -> Iterator[Candidate]:
    """Put the one figure of each query into `figure_of`; take out queries without exactly one, and yield why."""
    relevant: dict[str, set[str]] = defaultdict(set)
    for origin, record in source.records("qrels"):
        try:
            if isinstance(record, str):
                raise DataError(record)
            score = record.get("score")
            if score is None or score > 0:
                relevant[_key(record, "query-id")].add(_key(record, "corpus-id"))
        except DataError as error:
            yield origin, str(error)
        except TypeError:
            yield origin, f"its score is a {type(record['score']).__name__}: it must be a number"  # type: ignore[index]
    for query_id in list(queries):
        figures = relevant.get(query_id, set())
        if len(figures) == 1:
            (figure_of[query_id],) = figures
        else:
            origin, _ = queries.pop(query_id)
            yield origin, f"qrels names {len(figures)} figures for it: there must be one"


def _key(row: Mapping[str, Any], name: str) -> str:
    value = value_of(row, name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"its {name} is a {type(value).__name__}: it must be a text or an integer")
    return str(value)


def _easy_vqa(origin: Origin, row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Questions of easy-VQA, several to an image: `image_id`, `image`, and lists `questions` and `answers`."""
    questions, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(questions) != len(answers) or not questions:
        raise DataError(f"it has {len(questions)} questions and {len(answers)} answers: there must be as many of both")
    name, image = id_of(row, origin, "image_id"), value_of(row, "image")
    for number, (problem, answer) in enumerate(zip(questions, answers, strict=True)):
        if not isinstance(problem, str):
            yield f"its question {number} is a {type(problem).__name__}: it must be a text"
            continue
        yield try_question(
            id=f"{Path(origin.file).stem}-{name}-{number}",
            source="easy-VQA",
            problem=problem,
            answer=answer,
            images=[] if image is None else [image],
        )


def _nlvr(origin: Origin, row: Mapping[str, Any]) -> list[Question]:
    """A question of Cornell NLVR: `identifier`, `image`, `sentence`, `label`, and `objects`, JSON with a box each."""
    label, image = row.get("label"), value_of(row, "image")
    return [
        make_question(
            id=id_of(row, origin, "identifier"),
            source="NLVR",
            problem=f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}",
            choices=["true", "false"],
            answer=str(label).lower() if isinstance(label, bool) else label,
            images=[] if image is None else [image],
            regions=_boxes(row.get("objects"), image),
        )
    ]


def _boxes(objects: Any, image: Any) -> list[list[float]]:
    """Of all objects, as shares of the image; none where they or its size cannot be read."""
    try:
        wide, high = (image if isinstance(image, Image.Image) else Image.open(io.BytesIO(image["bytes"]))).size
        boxes = [[float(side) for side in found["box"]] for found in json.loads(objects)]
        return [[left / wide, top / high, width / wide, height / high] for left, top, width, height in boxes]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def jsonl_read(source: Source, keys: Keys = KEYS, image_dir: Path | None = None) -> Iterator[Candidate]:
    """Yield the questions of files of the user's own, or why a row is none; videos stay where they are.

    Args:
        image_dir: folder that relative paths start from and images lie in; None: that of the files.
    """
    root = source.folder() if image_dir is None else image_dir.absolute()
    return to_candidates(source.records(), partial(_jsonl, keys=keys, root=root))


def names_videos(source: Source, keys: Keys = KEYS) -> bool:
    """Return whether the first row of `source` has a column of videos."""
    return any(name in _first(source) for name in keys.video)


def _jsonl(origin: Origin, row: Mapping[str, Any], *, keys: Keys, root: Path) -> list[Question]:
    row = renamed_row(row, keys)
    reading = read_row(row)
    images = [_from(root, value) for value in reading.images]
    for path in images:
        if isinstance(path, str) and path and not ADDRESS.match(path):
            path_within(root, path)
    return [
        make_question(
            id=id_of(row if isinstance(row.get("id"), str | int) else {}, origin, "id"),  # no row is lost for its name
            source=value_of(row, "source") if isinstance(row.get("source"), str) else Path(origin.file).stem,
            problem=_question(reading.prompt),
            choices=reading.choices,
            answer=reading.answer,
            images=images,
            videos=[_existing(_from(root, value)) for value in reading.videos],
            regions=_regions(row, images),
            needs_image=False,
        )
    ]


def names_regions(source: Source) -> bool:
    """Return whether the first row of `source` has a column of boxes."""
    return any(name in _first(source) for name in COLUMNS)


def _first(source: Source) -> Mapping[str, Any]:
    return next((record for _, record in source.records() if not isinstance(record, str)), {})


def _regions(row: Mapping[str, Any], images: list[Any]) -> list[list[float]]:
    """The boxes of a row of one image; none where it cannot be read, which encoding it reports."""
    if len(images) != 1:
        return []
    size = (1, 1)
    if in_pixels_of_its_image(row):
        try:
            size = read_image(images[0]).size
        except DataError:
            return []
    return as_shares(boxes_of(row, size))


def _question(prompt: str | list[dict[str, Any]]) -> str:
    """The text of a question, also where it is a conversation of one message of the user."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1 or prompt[0]["role"] != "user":
        raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
    return text_of(prompt[0], "content")


def _from(root: Path, value: Any) -> Any:
    """A file of a row, as a path from `root` on where it is one, so that nothing else has to know where they start."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    is_path = isinstance(value, str) and value and not ADDRESS.match(value)
    return str((root / value).absolute()) if is_path else value


def _existing(video: Any) -> str:
    """The path of a video, which is not opened here."""
    if not isinstance(video, str) or not video:
        raise DataError(f"its video is {ascii(video)[:80]}: it must be a path")
    if not os.path.isfile(video):  # Path.is_file raises for a name that is too long
        raise DataError(f"video file {video[:200]} does not exist")
    return video


CONVERTERS = {
    "aokvqa": Converter(
        _each_row(partial(_multiple_choice, source="A-OKVQA", id_column="question_id")), hub_name=HUB_NAME
    ),
    "arxivqa": Converter(arxivqa_read, hub_name=ARXIVQA_HUB_NAME, count=lambda source: source.count("queries")),
    "mmmu_pro": Converter(
        _each_row(partial(_multiple_choice, source="MMMU-Pro", id_column="id")),
        several_images=True,
        hub_name=MMMU_PRO_HUB_NAME,
        config=HUB_CONFIG,
        split="test",
    ),
    "jsonl": Converter(jsonl_read, several_images=True),
    "easy_vqa": Converter(_each_row(_easy_vqa)),
    "nlvr": Converter(_each_row(_nlvr), regions=True),
}

for _name, _converter in CONVERTERS.items():
    registries.datasets.register(_name)(_converter.read)


def load_converter(spec: str) -> Converter:
    """Return how the data set that `spec` names is converted.

    Args:
        spec: one of `CONVERTERS`, or the name, dotted path or file of a function that takes a `Source` and yields
            questions; what it has as `converter`, a dict, are arguments of its `Converter`.

    Raises:
        ConfigError: nothing has this name, or it is no function.
    """
    if spec in CONVERTERS:
        return CONVERTERS[spec]
    read = registries.datasets.load(spec)
    return Converter(read, **getattr(read, "converter", {}))


def read_ids(path: Path) -> set[str]:
    """Return the ids in a file: one per line, or a JSON list.

    Raises:
        ConfigError: the file does not exist, cannot be read, has none, or has something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
        found = json.loads(text) if text.startswith("[") else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"question_id_file is {path}, which cannot be read ({error}).") from error
    if any(isinstance(value, bool) or not isinstance(value, str | int) for value in found):
        raise ConfigError(f"question_id_file is {path}, whose list holds more than texts and integers.")
    ids = {str(value).strip() for value in found} - {""}
    if not ids:
        raise ConfigError(f"question_id_file is {path}, which has no ids: give one per line.")
    return ids


def keep_ids(candidates: Iterable[Candidate], ids: set[str], missing: set[str]) -> Iterator[Candidate]:
    """Yield the questions with the given ids, and the reasons; take the ids of these questions out of `missing`."""
    for origin, candidate in candidates:
        if isinstance(candidate, str):
            yield origin, candidate
        elif candidate.id in ids:
            missing.discard(candidate.id)
            yield origin, candidate


# Words that mean other options by their place or letter. Such options stay where they are, and so does a question that
# names options by letter.
_PLACES = re.compile(r"\b(above|below|preceding|previous|following|former|latter|first|second|last)\b", re.IGNORECASE)
_LETTERS = re.compile(
    r"^\W*[A-J]\W*$"
    r"|\b[A-J]\)?\s*(?:,|&|/|and|or|nor)\s*\(?[A-J]\b"
    r"|\b(?:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-J]\b"
)
_OPTION_LETTER = re.compile(r"\b(?:options?|choices?|answers?)\s+\(?[A-J]\b")


def shuffle_choices(candidates: Iterable[Candidate], seed: int) -> Iterator[Candidate]:
    """Yield the candidates with their options in another order, where that does not change what they mean.

    Among the questions with n options, every n in a row have each letter once as the right one.
    """
    random = Random(f"choices {seed}")
    places: dict[int, list[int]] = defaultdict(list)  # of right options still to be used, by the number of options
    for origin, question in candidates:
        if isinstance(question, str) or not question.choices or stays_in_order(question):
            yield origin, question
            continue
        others = list(question.choices)
        right = others.pop(LETTERS.index(question.solution))
        random.shuffle(others)
        waiting = places[len(question.choices)]
        if not waiting:
            waiting.extend(range(len(question.choices)))
            random.shuffle(waiting)
        place = waiting.pop()
        yield origin, replace(question, choices=[*others[:place], right, *others[place:]], solution=LETTERS[place])


def stays_in_order(question: Question) -> bool:
    """Return whether the question or one of its options refers to options by their place or letter."""
    choices = question.choices or []
    return bool(_OPTION_LETTER.search(question.problem)) or any(
        _PLACES.search(choice) or _LETTERS.search(choice) for choice in choices
    )
