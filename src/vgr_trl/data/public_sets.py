"""Public question sets and how their rows become rows that `read_row` understands, by name."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset, concatenate_datasets

from vgr_trl import registries
from vgr_trl.data.load import MMMU_PRO
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read_row import KEYS, UNREADABLE, is_vision_only, list_of, text_of, value_of
from vgr_trl.utils import DataError

HUB_NAME = "HuggingFaceM4/A-OKVQA"
ARXIVQA_HUB_NAME = "openbmb/VisRAG-Ret-Test-ArxivQA"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Converter:
    """Conversion of a data set.

    Attributes:
        rows: returns the rows that a published row becomes, mostly one, with columns that `read_row` knows.
        several_images: whether a question may have any number of images, so that rows get `images`, not `image`.
        regions: whether it says in boxes what a question is about.
        id_column: that of the ids; rows without one get their place as id.
        hub_name: read where no source is named; None: a source must be named.
        config: configuration of the hub data set that is read where none is named.
        split: read where none is named.
        join: makes one table of the configurations that it names, for a set of several.
    """

    rows: Callable[[Row], Iterable[Row]]
    several_images: bool = False
    regions: bool = False
    id_column: str = "id"
    hub_name: str | None = None
    config: str | None = None
    split: str = "train"
    join: Callable[[Callable[[str], Dataset]], Dataset] | None = None


def _multiple_choice(row: Row, source: str) -> list[Row]:
    """Return a row that must have options; the vision-only rows of MMMU-Pro have them in the image."""
    if is_vision_only(row):
        return [{**row, "source": f"{source} vision"}]
    if value_of(row, *KEYS.choices) in (None, []):
        raise DataError("it has no options")
    return [{**row, "source": source}]


def join_arxivqa(load: Callable[[str], Dataset]) -> Dataset:
    """Return the questions of ArxivQA as VisRAG publishes it, in the order of their figures.

    Three tables: `corpus` (`corpus-id`, `image`), `queries` (`query-id`, `query`, `options`, `answer`) and `qrels`
    (`query-id`, `corpus-id`, and `score`), which says which figure a question is about. A query without exactly one
    figure gets the reason in the column `UNREADABLE`.
    """
    corpus, queries, qrels = load("corpus"), load("queries"), load("qrels")
    figures: dict[str, set[str]] = defaultdict(set)
    for row in qrels:
        if row.get("score") != 0:
            figures[str(row["query-id"])].add(str(row["corpus-id"]))
    place: dict[str, int] = {}
    for number, name in enumerate(corpus["corpus-id"]):
        place.setdefault(str(name), number)
    found, reasons = list[int](), list[str | None]()
    names = [str(name) for name in queries["query-id"]]
    times = Counter(names)
    for query in names:
        of = figures[query]
        figure = place.get(next(iter(of), ""))
        if len(of) != 1 or times[query] != 1:
            reasons.append(f"its query-id {query[:80]!a} occurs {times[query]} times, with {len(of)} figures in qrels")
        else:
            reasons.append(None if figure is not None else f"its figure {next(iter(of))[:80]!a} is not in the corpus")
        found.append(figure or 0)
    order = sorted(range(len(queries)), key=lambda query: (reasons[query] is not None, found[query]))
    asked = queries.add_column(UNREADABLE, reasons).select(order).flatten_indices()
    shown = corpus.select_columns(["image"]).select([found[query] for query in order])
    return concatenate_datasets([asked, shown], axis=1)


def _easy_vqa(row: Row) -> Iterator[Row]:
    """Yield the questions of easy-VQA, several to an image: `image_id`, `image`, and lists `questions`, `answers`."""
    asked, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(asked) != len(answers) or not asked:
        raise DataError(f"it has {len(asked)} questions and {len(answers)} answers: there must be as many of both")
    for number, (question, answer) in enumerate(zip(asked, answers, strict=True)):
        about = {"id": f"{row.get('image_id')}-{number}", "source": "easy-VQA", "image": row.get("image")}
        yield {**about, "question": question, "answer": answer}


def _nlvr(row: Row) -> list[Row]:
    """Return the question of Cornell NLVR: `identifier`, `image`, `sentence`, `label`; JSON `objects` with boxes."""
    try:
        boxes = [item["box"] for item in json.loads(row["objects"])]
    except (ValueError, TypeError, KeyError):
        boxes = []  # there are none in the training split
    statement = {
        "id": row.get("identifier"),
        "source": "NLVR",
        "question": f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}",
        "choices": ["true", "false"],
        "answer": str(row.get("label")).lower(),
        "image": row.get("image"),
        "regions": boxes,
    }
    return [statement]


def _keep_row(row: Row) -> list[Row]:
    """Return a row of the user's own files, in any format that `read_row` knows."""
    return [row]


_aokvqa = partial(_multiple_choice, source="A-OKVQA")
_arxivqa = partial(_multiple_choice, source="ArxivQA")
_mmmu_pro = partial(_multiple_choice, source="MMMU-Pro")
CONVERTERS = {
    "aokvqa": Converter(_aokvqa, hub_name=HUB_NAME, id_column="question_id"),
    "arxivqa": Converter(_arxivqa, hub_name=ARXIVQA_HUB_NAME, id_column="query-id", join=join_arxivqa),
    "mmmu_pro": Converter(_mmmu_pro, several_images=True, hub_name=MMMU_PRO[0], config=MMMU_PRO[1], split="test"),
    "jsonl": Converter(_keep_row, several_images=True),
    "easy_vqa": Converter(_easy_vqa),
    "nlvr": Converter(_nlvr, regions=True),
}
for _name, _converter in CONVERTERS.items():
    registries.datasets.register(_name)(_converter.rows)


def load_converter(spec: str) -> Converter:
    """Return how the data set that `spec` names is converted.

    Args:
        spec: one of `CONVERTERS`, or the name, dotted path or file of a function from a published row to rows; what
            it has as `converter`, a dict, are arguments of its `Converter`.

    Raises:
        ConfigError: nothing has this name, or it is no function.
    """
    if spec in CONVERTERS:
        return CONVERTERS[spec]
    rows = registries.datasets.load(spec)
    return Converter(rows, **getattr(rows, "converter", {}))


def read_ids(path: Path) -> set[str]:
    """Return the ids in a file: one per line, or a JSON list."""
    text = path.read_text(encoding="utf-8-sig").strip()
    found = json.loads(text) if text.startswith("[") else text.splitlines()
    return {str(value).strip() for value in found} - {""}


# Words that mean other options by their place or letter. Such options stay where they are, and so does a question that
# names options by letter.
_PLACES = re.compile(r"\b(above|below|preceding|previous|following|former|latter|first|second|last)\b", re.IGNORECASE)
_LETTERS = re.compile(
    r"^\W*[A-J]\W*$"
    r"|\b[A-J]\)?\s*(?:,|&|/|and|or|nor)\s*\(?[A-J]\b"
    r"|\b(?:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-J]\b"
)
_OPTION_LETTER = re.compile(r"\b(?:options?|choices?|answers?)\s+\(?[A-J]\b")


def shuffle_choices(rows: Dataset, seed: int) -> Dataset:
    """Return converted rows with their options in another order, where that does not change what they mean.

    Among the questions with n options, every n in a row have each letter once as the right one.
    """
    random = Random(f"choices {seed}")
    places: dict[int, list[int]] = defaultdict(list)  # of right options still to be used, by the number of options
    solutions, options = list(rows["solution"]), list(rows["choices"])
    for row, problem in enumerate(rows["problem"]):
        if problem is None or not options[row] or stays_in_order(problem, options[row]):
            continue
        others = list(options[row])
        right = others.pop(LETTERS.index(solutions[row]))
        random.shuffle(others)
        waiting = places[len(options[row])]
        if not waiting:
            waiting.extend(range(len(options[row])))
            random.shuffle(waiting)
        place = waiting.pop()
        options[row], solutions[row] = [*others[:place], right, *others[place:]], LETTERS[place]
    columns = {"choices": options, "solution": solutions}
    features, names = rows.features, rows.column_names
    for name, values in columns.items():
        rows = rows.remove_columns(name).add_column(name, values, feature=features[name])
    return rows.select_columns(names)


def stays_in_order(problem: str, choices: Iterable[str]) -> bool:
    """Return whether the question or one of its options refers to options by their place or letter."""
    names_options = any(_PLACES.search(choice) or _LETTERS.search(choice) for choice in choices)
    return names_options or _OPTION_LETTER.search(problem) is not None
