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
from transformers.utils import logging

from vgr_trl import registries
from vgr_trl.data.columns import (
    KEYS,
    VISION_ONLY_PROBLEM,
    Candidate,
    Keys,
    Origin,
    Question,
    files_of,
    id_of,
    list_of,
    make_question,
    read_row,
    renamed_row,
    text_of,
    to_candidates,
    try_question,
)
from vgr_trl.data.images import ADDRESS, as_shares, boxes_of, in_pixels_of_its_image, path_within, read_image
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read import Source
from vgr_trl.utils import DataError

logger = logging.get_logger(__name__)

HUB_NAME = "HuggingFaceM4/A-OKVQA"
ARXIVQA_HUB_NAME = "openbmb/VisRAG-Ret-Test-ArxivQA"
MMMU_PRO_HUB_NAME = "MMMU/MMMU_Pro"
HUB_CONFIG = "standard (10 options)"  # of MMMU-Pro


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
    """

    read: Callable[..., Iterator[Candidate]]
    several_images: bool = False
    regions: bool = False
    hub_name: str | None = None
    config: str | None = None
    split: str = "train"


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
    Figures are read once and one by one, of several with one id the first; questions, which are short, are kept.
    """
    queries: dict[str, list[tuple[Origin, Any]]] = defaultdict(list)
    figures: dict[str, set[str]] = defaultdict(set)
    asked: dict[str, list[tuple[Origin, Any]]] = defaultdict(list)
    for origin, row, ids in _with_ids(source, "queries", "query-id"):
        if isinstance(row, str):
            yield origin, row
        else:
            queries[ids[0]].append((origin, row))
    for origin, row, ids in _with_ids(source, "qrels", "query-id", "corpus-id"):
        if isinstance(row, str):
            yield origin, row
        elif row.get("score") != 0:
            figures[ids[0]].add(ids[1])
    for query_id, rows in queries.items():
        found = figures[query_id]
        if len(rows) == 1 and len(found) == 1:
            asked[found.pop()] += rows
            continue
        reason = f"qrels names {len(found)} figures for it: there must be one"
        if len(rows) > 1:
            reason = f"its query-id {query_id[:80]!a} occurs twice"
        yield from ((origin, reason) for origin, _ in rows)
    to_questions = partial(_multiple_choice, source="ArxivQA", id_column="query-id")
    for origin, figure, ids in _with_ids(source, "corpus", "corpus-id"):
        if isinstance(figure, str):
            yield origin, figure
        else:
            rows = [(place, {**row, "image": figure.get("image")}) for place, row in asked.pop(ids[0], [])]
            yield from to_candidates(rows, to_questions)
    for name, rows in asked.items():
        yield from ((origin, f"its figure {name[:80]!a} is not in the corpus") for origin, _ in rows)


def _with_ids(source: Source, config: str, *names: str) -> Iterator[tuple[Origin, Any, list[str]]]:
    """Yield the rows of a table with the ids in the named columns; in place of a row without one, why it is none."""
    for origin, row in source.records(config):
        ids = [] if isinstance(row, str) else [row.get(name) for name in names]
        if any(isinstance(value, bool) or not isinstance(value, str | int) or value == "" for value in ids):
            row = f"its {' and '.join(names)} must be texts or integers"
        yield origin, row, list(map(str, ids))


def _easy_vqa(origin: Origin, row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Questions of easy-VQA, several to an image: `image_id`, `image`, and lists `questions` and `answers`."""
    questions, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(questions) != len(answers) or not questions:
        raise DataError(f"it has {len(questions)} questions and {len(answers)} answers: there must be as many of both")
    name = f"{Path(origin.file).stem}-{id_of(row, origin, 'image_id')}"
    for number, (problem, answer) in enumerate(zip(questions, answers, strict=True)):
        yield try_question(
            id=f"{name}-{number}",
            source="easy-VQA",
            problem=text_of({"question": problem}, "question"),
            answer=answer,
            images=files_of(row, "image"),
        )


def _nlvr(origin: Origin, row: Mapping[str, Any]) -> list[Question]:
    """A question of Cornell NLVR: `identifier`, `image`, `sentence`, `label`, and `objects`, JSON with a box each."""
    label, images = row.get("label"), files_of(row, "image")
    try:
        image = Image.open(io.BytesIO(images[0]["bytes"]))
        boxes = [[float(side) for side in found["box"]] for found in json.loads(row["objects"])]
        regions = [[x / image.width, y / image.height, w / image.width, h / image.height] for x, y, w, h in boxes]
    except (OSError, ValueError, TypeError, LookupError):
        regions = []  # no row is lost for its boxes; encoding reports an image that cannot be read
    return [
        make_question(
            id=id_of(row, origin, "identifier"),
            source="NLVR",
            problem=f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}",
            choices=["true", "false"],
            answer=str(label).lower() if isinstance(label, bool) else label,
            images=images,
            regions=regions,
        )
    ]


def jsonl_read(source: Source, keys: Keys = KEYS, image_dir: Path | None = None) -> Iterator[Candidate]:
    """Yield the questions of files of the user's own, or why a row is none; videos stay where they are.

    Args:
        image_dir: folder that relative paths start from and images lie in; None: that of the files.
    """
    root = source.folder() if image_dir is None else image_dir.absolute()
    return to_candidates(source.records(), partial(_jsonl, keys=keys, root=root))


def _jsonl(origin: Origin, row: Mapping[str, Any], *, keys: Keys, root: Path) -> list[Question]:
    row = renamed_row(row, keys)
    reading = read_row(row)
    prompt = reading.prompt
    if not isinstance(prompt, str):
        if len(prompt) != 1 or prompt[0]["role"] != "user":
            raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
        prompt = text_of(prompt[0], "content")
    images, videos = ([_full_path(value, root) for value in files] for files in (reading.images, reading.videos))
    for video in videos:
        if not isinstance(video, str) or not os.path.isfile(video):  # Path.is_file raises for a name that is too long
            raise DataError(f"video file {str(video)[:200]} does not exist")
    return [
        make_question(
            id=id_of(row if isinstance(row.get("id"), str | int) else {}, origin, "id"),  # no row is lost for its name
            source=row["source"] if isinstance(row.get("source"), str) else Path(origin.file).stem,
            problem=prompt,
            choices=reading.choices,
            answer=reading.answer,
            images=images,
            videos=videos,
            regions=_regions(row, images),
            needs_image=False,
        )
    ]


def _full_path(value: Any, root: Path) -> Any:
    """Return a file of a row, as a full path where it is a path, or raise `DataError` if that leads out of `root`."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    is_path = isinstance(value, str) and value and not ADDRESS.match(value)
    return str(path_within(root, value).absolute()) if is_path else value


def _regions(row: Mapping[str, Any], images: list[Any]) -> list[list[float]]:
    """The boxes of a row of one image, which is read only where they are in pixels."""
    if len(images) != 1:
        return []
    return as_shares(boxes_of(row, read_image(images[0]).size if in_pixels_of_its_image(row) else (1, 1)))


_read_aokvqa, _read_mmmu_pro = (
    _each_row(partial(_multiple_choice, source=source, id_column=id_column))
    for source, id_column in (("A-OKVQA", "question_id"), ("MMMU-Pro", "id"))
)
CONVERTERS = {
    "aokvqa": Converter(_read_aokvqa, hub_name=HUB_NAME),
    "arxivqa": Converter(arxivqa_read, hub_name=ARXIVQA_HUB_NAME),
    "mmmu_pro": Converter(_read_mmmu_pro, True, hub_name=MMMU_PRO_HUB_NAME, config=HUB_CONFIG, split="test"),
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
    """Return the ids in a file: one per line, or a JSON list."""
    text = path.read_text(encoding="utf-8-sig").strip()
    found = json.loads(text) if text.startswith("[") else text.splitlines()
    return {str(value).strip() for value in found} - {""}


def keep_ids(candidates: Iterable[Candidate], ids: set[str]) -> Iterator[Candidate]:
    """Yield the questions with the given ids, and the reasons; warn of ids that no question has."""
    missing = set(ids)
    for origin, candidate in candidates:
        if isinstance(candidate, str) or candidate.id in ids:
            missing -= set() if isinstance(candidate, str) else {candidate.id}
            yield origin, candidate
    if missing:
        logger.warning(f"No question has {len(missing)} of the ids: {', '.join(sorted(missing)[:3])}, …")


# Words that mean other options by their place or letter. Such options stay where they are, and so does a question that
# names options by letter.
_PLACES = re.compile(r"\b(above|below|preceding|previous|following|former|latter|first|second|last)\b", re.IGNORECASE)
_LETTERS = re.compile(
    r"^\W*[A-J]\W*$"
    r"|\b[A-J]\)?\s*(?:,|&|/|and|or|nor)\s*\(?[A-J]\b"
    r"|\b(?:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-J]\b"
)
_OPTION_LETTER = re.compile(r"\b(?:options?|choices?|answers?)\s+\(?[A-J]\b")


def shuffled_choices(candidates: Iterable[Candidate], seed: int) -> Iterator[Candidate]:
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
    names_options = any(_PLACES.search(choice) or _LETTERS.search(choice) for choice in question.choices or ())
    return names_options or _OPTION_LETTER.search(question.problem) is not None
