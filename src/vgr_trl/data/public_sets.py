"""Converters of public question sets and of the user's own files, by name.

A converter reads a `Source` and yields, per row, where it was read and a `Question`, or why it is none.
"""

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
)
from vgr_trl.data.images import ADDRESS, as_shares, boxes_of, in_pixels_of_its_image, path_within, read_image
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read import Source
from vgr_trl.utils import DataError, RewardError

HUB_NAME = "HuggingFaceM4/A-OKVQA"
ARXIVQA_HUB_NAME = "openbmb/VisRAG-Ret-Test-ArxivQA"
MMMU_PRO_HUB_NAME = "MMMU/MMMU_Pro"
HUB_CONFIG = "standard (10 options)"  # of MMMU-Pro


Row = Mapping[str, Any]


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


def _questions(
    origin: Origin, row: Row, *, source: str = "", id_column: str = "id", keys: Keys = KEYS, root: Path = Path()
) -> list[Question]:
    """Return the question of a row that `read_row` understands.

    Args:
        source: the public set, whose questions all have images; empty: a file of the user's own.
        id_column: the id is made of the row's place where it has none there.
        root: folder that relative paths start from, and that none leads out of.
    """
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
    size = read_image(images[0]).size if len(images) == 1 and in_pixels_of_its_image(row) else (1, 1)
    own = row["source"] if isinstance(row.get("source"), str) else Path(origin.file).stem
    return [
        make_question(
            id=id_of(row if isinstance(row.get(id_column), str | int) else {}, origin, id_column),
            source=source or own,
            problem=prompt,
            choices=reading.choices,
            answer=reading.answer,
            images=images,
            videos=videos,
            regions=as_shares(boxes_of(row, size)) if len(images) == 1 else [],
            needs_image=bool(source),
        )
    ]


def _full_path(value: Any, root: Path) -> Any:
    """Return a file of a row, as a full path where it is a path, or raise `DataError` if that leads out of `root`."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    is_path = isinstance(value, str) and value and not ADDRESS.match(value)
    return str(path_within(root, value).absolute()) if is_path else value


def jsonl_read(source: Source, keys: Keys = KEYS, image_dir: Path | None = None) -> Iterator[Candidate]:
    """Yield the questions of files of the user's own, or why a row is none; videos stay where they are.

    Args:
        image_dir: folder that relative paths start from and images lie in; None: that of the files.
    """
    root = source.folder() if image_dir is None else image_dir.absolute()
    return to_candidates(source.records(), partial(_questions, keys=keys, root=root))


def _multiple_choice(origin: Origin, row: Row, **options: Any) -> Iterator[Question]:
    """Yield the question of A-OKVQA or MMMU-Pro, whose vision-only rows have question and options in the image."""
    for question in _questions(origin, row, **options):
        if question.problem == VISION_ONLY_PROBLEM:
            yield replace(question, source=f"{question.source} vision")
        elif question.choices is None:
            raise DataError("it has no options")
        else:
            yield question


def arxivqa_read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of ArxivQA as VisRAG publishes it, in the order of their figures, or why a row is none.

    Three tables: `corpus` (`corpus-id`, `image`), `queries` (`query-id`, `query`, `options`, `answer`) and `qrels`
    (`query-id`, `corpus-id`, and `score`), which says which figure a question is about.
    Figures are read once and one by one, of several with one id the first; questions, which are short, are kept.
    """
    left_out: list[Candidate] = []
    queries, figures, asked = defaultdict[str, Any](list), defaultdict[str, Any](set), defaultdict[str, Any](list)
    for origin, row, (query_id,) in _with_ids(source, "queries", ["query-id"], left_out):
        queries[query_id].append((origin, row))
    for _, row, (query_id, figure) in _with_ids(source, "qrels", ["query-id", "corpus-id"], left_out):
        if row.get("score") != 0:
            figures[query_id].add(figure)
    for query_id, rows in queries.items():
        found = figures[query_id]
        if len(rows) == len(found) == 1:
            asked[found.pop()] += rows
        else:
            reason = f"its query-id {query_id[:80]!a} occurs {len(rows)} times, with {len(found)} figures in qrels"
            left_out += [(origin, reason) for origin, _ in rows]
    to_questions = partial(_multiple_choice, source="ArxivQA", id_column="query-id", root=source.folder())
    for _, row, (figure,) in _with_ids(source, "corpus", ["corpus-id"], left_out):
        queries_of_it = [(origin, {**query, "image": row.get("image")}) for origin, query in asked.pop(figure, [])]
        yield from to_candidates(queries_of_it, to_questions)
    for figure, rows in asked.items():
        left_out += [(origin, f"its figure {figure[:80]!a} is not in the corpus") for origin, _ in rows]
    yield from left_out


def _with_ids(
    source: Source, config: str, names: list[str], left_out: list[Candidate]
) -> Iterator[tuple[Origin, Any, list[str]]]:
    """Yield the rows of a table with the ids in the named columns; those without one go to `left_out`."""
    for origin, row in source.records(config):
        if isinstance(row, str):
            left_out.append((origin, row))
        elif all(isinstance(row.get(name), str | int) and row[name] != "" for name in names):
            yield origin, row, [str(row[name]) for name in names]
        else:
            left_out.append((origin, f"its {' and '.join(names)} must be texts or integers"))


def _easy_vqa(origin: Origin, row: Row, *, root: Path) -> Iterator[Question | str]:
    """Yield the questions of easy-VQA, several to an image: `image_id`, `image`, and lists `questions`, `answers`."""
    asked, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(asked) != len(answers) or not asked:
        raise DataError(f"it has {len(asked)} questions and {len(answers)} answers: there must be as many of both")
    name = f"{Path(origin.file).stem}-{id_of(row, origin, 'image_id')}"
    for number, (problem, answer) in enumerate(zip(asked, answers, strict=True)):
        one = {"id": f"{name}-{number}", "question": problem, "answer": answer, "image": row.get("image")}
        try:
            yield from _questions(origin, one, source="easy-VQA", root=root)
        except (DataError, RewardError) as error:
            yield str(error).rstrip(".")


def _nlvr(origin: Origin, row: Row, *, root: Path) -> list[Question]:
    """Return the question of Cornell NLVR: `identifier`, `image`, `sentence`, `label`; JSON `objects` with boxes."""
    try:
        boxes = [item["box"] for item in json.loads(row["objects"])]
    except (ValueError, TypeError, KeyError):
        boxes = []  # there are none in the training split
    statement = {
        "identifier": row.get("identifier"),
        "question": f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}",
        "choices": ["true", "false"],
        "answer": str(row.get("label")).lower(),
        "image": row.get("image"),
        "regions": boxes,
    }
    return _questions(origin, statement, source="NLVR", id_column="identifier", root=root)


def _each_row(questions: Callable[..., Iterable[Question | str]], **options: Any) -> Callable[..., Iterator[Candidate]]:
    """Return a reader of a set in which every row is converted by itself."""
    return lambda source: to_candidates(source.records(), partial(questions, root=source.folder(), **options))


_aokvqa = _each_row(_multiple_choice, source="A-OKVQA", id_column="question_id")
_mmmu_pro = _each_row(_multiple_choice, source="MMMU-Pro")
CONVERTERS = {
    "aokvqa": Converter(_aokvqa, hub_name=HUB_NAME),
    "arxivqa": Converter(arxivqa_read, hub_name=ARXIVQA_HUB_NAME),
    "mmmu_pro": Converter(_mmmu_pro, True, hub_name=MMMU_PRO_HUB_NAME, config=HUB_CONFIG, split="test"),
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
    """Yield the questions with the given ids, and the reasons."""
    for origin, candidate in candidates:
        if isinstance(candidate, str) or candidate.id in ids:
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
