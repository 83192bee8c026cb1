"""ArxivQA as VisRAG publishes it (Li et al., 2024; Yu et al., 2024): questions about figures of papers.

Three configurations: `corpus` (`corpus-id`, `image`), `queries` (`query-id`, `query`, `options`, `answer`) and `qrels`
(`query-id`, `corpus-id`, and `score`), which says which figure a question is about.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    answer_of,
    id_of,
    make_question,
    options_of,
    text_of,
    to_candidates,
    value_of,
)
from vgr_trl.errors import DataError

HUB_NAME = "openbmb/VisRAG-Ret-Test-ArxivQA"
Rows = dict[str, tuple[Origin, Mapping[str, Any]]]


def read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of `source` in the order of their figures, or why a row is none.

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
        yield from to_candidates(rows, lambda place, row, figure=record: _questions(place, row, figure))  # type: ignore[misc]
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
        raise DataError(f"its {name} is a {type(value).__name__}: it must be a text or a whole number")
    return str(value)


def _questions(origin: Origin, row: Mapping[str, Any], figure: Mapping[str, Any]) -> list[Question]:
    options = options_of(row.get("options"))
    image = value_of(figure, "image")
    return [
        make_question(
            id=id_of(row, origin, "query-id"),
            source="ArxivQA",
            problem=text_of(row, "query"),
            choices=options,
            answer=answer_of(row, options, "answer"),
            images=[] if image is None else [image],
        )
    ]
