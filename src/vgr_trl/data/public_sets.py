"""Convert the rows of public question sets, by name, to rows that `read_row` understands."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset, concatenate_datasets

from vgr_trl import registries
from vgr_trl.data.load import MMMU_PRO
from vgr_trl.data.read_row import KEYS, UNREADABLE, is_vision_only, list_of, text_of, value_of
from vgr_trl.errors import DataError
from vgr_trl.rewards.answers import LETTERS

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
    if value_of(row, *KEYS["choices"]) in (None, []):
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
    found = [next(iter(figures[name])) if len(figures[name]) == times[name] == 1 else None for name in names]
    reason = "its query-id occurs twice, or it does not have exactly one figure in qrels and corpus"
    queries = queries.add_column(UNREADABLE, [reason if number is None else None for number in found])
    order = sorted(range(len(found)), key=lambda query: (found[query] is None, found[query]))
    shown = corpus.select_columns(["image"]).select([found[query] or 0 for query in order])
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


_aokvqa = partial(_multiple_choice, source="A-OKVQA")
_arxivqa = partial(_multiple_choice, source="ArxivQA")
_mmmu_pro = partial(_multiple_choice, source="MMMU-Pro")
CONVERTERS = {
    "aokvqa": Converter(_aokvqa, hub_name=HUB_NAME, id_column="question_id"),
    "arxivqa": Converter(_arxivqa, hub_name="openbmb/VisRAG-Ret-Test-ArxivQA", id_column="query-id", join=join_arxivqa),
    "mmmu_pro": Converter(_mmmu_pro, several_images=True, hub_name=MMMU_PRO[0], config=MMMU_PRO[1], split="test"),
    "jsonl": Converter(lambda row: [row], several_images=True),
    "easy_vqa": Converter(_easy_vqa),
    "nlvr": Converter(_nlvr, regions=True),
}
for _name, _converter in CONVERTERS.items():
    registries.datasets.register(_name)(_converter.rows)


def load_converter(spec: str) -> Converter:
    """Return a converter by its name in `CONVERTERS`, or for the name, dotted path or file of a function.

    The function maps a published row to rows. Its attribute `converter`, a dict, has arguments of its `Converter`.
    """
    if spec in CONVERTERS:
        return CONVERTERS[spec]
    rows = registries.datasets.load(spec)
    return Converter(rows, **getattr(rows, "converter", {}))


def read_ids(path: Path) -> frozenset[str]:
    """Return the ids in a file, a text with an id per line, or a JSON list."""
    text = path.read_text(encoding="utf-8-sig").strip()
    found = json.loads(text) if text.startswith("[") else text.splitlines()
    return frozenset(str(value).strip() for value in found) - {""}


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
        seed: of the order.
    """
    solutions, options, problems = list(rows["solution"]), list(rows["choices"]), list(rows["problem"])
    for side in sides:
        random, places = Random(f"choices {seed}"), defaultdict[int, list[int]](list)  # of right options, still to use
        for row in side:
            if options[row] and not stays_in_order(problems[row], options[row]):
                others, waiting = list(options[row]), places[len(options[row])]
                right = others.pop(LETTERS.index(solutions[row]))
                random.shuffle(others)
                if not waiting:
                    waiting.extend(range(len(options[row])))
                    random.shuffle(waiting)
                place = waiting.pop()
                options[row], solutions[row] = [*others[:place], right, *others[place:]], LETTERS[place]
    for name, values in {"choices": options, "solution": solutions}.items():
        rows = rows.remove_columns(name).add_column(name, values, feature=rows.features[name])
    return rows


def stays_in_order(problem: str, choices: Iterable[str]) -> bool:
    """Return whether the question or an option refers to options by their place or letter."""
    names_options = any(_PLACES.search(choice) or _LETTERS.search(choice) for choice in choices)
    return names_options or _OPTION_LETTER.search(problem) is not None
