from pathlib import Path

import pytest
from support.made_sets import jsonl, parquet, picture, questions, reasons

from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.public_sets import arxivqa_read as read
from vgr_trl.data.read import Source

FIGURES = {f"1501.0000{number}_1.jpg": picture((number, 0, 0)) for number in range(1, 5)}
NAMES = list(FIGURES)


def query(number: int, **changed):
    options = ["A) It rises", "B) It falls", "C) It stays", "D) It vanishes"]
    return {
        "query-id": f"q{number}",
        "query": f"What does curve {number} do?",
        "options": options,
        "answer": "B",
    } | changed


def folder_of(tmp_path: Path, queries, qrels=None, corpus=None) -> Source:
    corpus = [{"corpus-id": name, "image": image} for name, image in FIGURES.items()] if corpus is None else corpus
    if qrels is None:
        qrels = [
            {"query-id": row["query-id"], "corpus-id": NAMES[number % 4], "score": 1}
            for number, row in enumerate(queries)
        ]
    for name, rows in (("corpus", corpus), ("queries", queries), ("qrels", qrels)):
        parquet(tmp_path / "set" / name / "train-00000-of-00001.parquet", rows)
    return Source(dataset_path=str(tmp_path / "set"))


def test_questions_get_their_figures(tmp_path):
    source = folder_of(tmp_path, [query(0), query(1), query(2), query(3), query(4, answer="D")])
    found = questions(read(source))
    # In the order of the figures: the first figure is asked about by the questions 0 and 4.
    assert [question.id for question in found] == ["q0", "q4", "q1", "q2", "q3"]
    assert [question.images for question in found] == [[FIGURES[NAMES[number]]] for number in (0, 0, 1, 2, 3)]
    assert [question.solution for question in found] == ["B", "D", "B", "B", "B"]
    assert found[0].choices == ["It rises", "It falls", "It stays", "It vanishes"]
    assert (found[0].source, found[0].problem) == ("ArxivQA", "What does curve 0 do?")
    assert CONVERTERS["arxivqa"].count(source) == 5


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("b", "B"), ("B)", "B"), ("(B)", "B"), ("B) It falls", "B"), ("It falls", "B"), ("B.", "B")],
)
def test_the_answer_as_a_letter_or_a_text(tmp_path, answer, letter):
    (found,) = questions(read(folder_of(tmp_path, [query(0, answer=answer)])))
    assert found.solution == letter


def test_the_answer_as_an_index(tmp_path):
    (found,) = questions(read(folder_of(tmp_path, [query(0, answer=1)])))
    assert found.solution == "B"


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ([10, 20, 30], ["10", "20", "30"]),
        ("['10', '20']", ["10", "20"]),
        (["(A) x", "(B) y"], ["x", "y"]),
        (["A. x", "B. y"], ["x", "y"]),
        (["A: x", "B: y"], ["x", "y"]),
        (["A) x", "y"], ["A) x", "y"]),  # only one carries its letter, which may then be part of the text
    ],
)
def test_options_in_the_forms_that_occur(tmp_path, options, choices):
    (found,) = questions(read(folder_of(tmp_path, [query(0, options=options, answer="A")])))
    assert (found.choices, found.solution) == (choices, "A")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"options": ["B) x", "A) y"], "answer": "A"},
            "its options carry the letters B, A, which are not those of their places",
        ),
        (
            {"options": [2, 1, 3, 0], "answer": 2},
            "its answer is the number 2, which is one option's text and could be another's index",
        ),
        ({"options": ["A) x", "B) y"], "answer": "C) z"}, "solution is 'C) z', which is none of the choices"),
        ({"options": ["x", "y"], "answer": "A) z"}, "solution is 'A) z', which is none of the choices"),
    ],
)
def test_what_could_be_misread_is_refused(tmp_path, changed, reason):
    ((_, found),) = reasons(read(folder_of(tmp_path, [query(0, **changed)])))
    assert found.startswith(reason)


def test_an_index_that_is_its_own_options_text(tmp_path):
    (found,) = questions(read(folder_of(tmp_path, [query(0, options=[0, 1, 2], answer=2)])))
    assert (found.choices, found.solution) == (["0", "1", "2"], "C")


def test_what_cannot_be_joined_is_listed(tmp_path):
    queries = [query(number) for number in range(6)] + [query(5, answer="C"), query(7)]
    qrels = [
        {"query-id": "q0", "corpus-id": NAMES[0], "score": 1},
        {"query-id": "q1", "corpus-id": NAMES[0], "score": 1},
        {"query-id": "q1", "corpus-id": NAMES[1], "score": 1},
        {"query-id": "q2", "corpus-id": "gone.jpg", "score": 1},
        {"query-id": "q3", "corpus-id": NAMES[0], "score": 0},
        {"query-id": "q4", "corpus-id": NAMES[3], "score": 1},
        {"query-id": "q7", "corpus-id": NAMES[1], "score": 1},
    ]
    corpus = [
        {"corpus-id": NAMES[0], "image": FIGURES[NAMES[0]]},
        {"corpus-id": NAMES[0], "image": FIGURES[NAMES[1]]},
        {"corpus-id": NAMES[1], "image": None},
        {"corpus-id": NAMES[3], "image": FIGURES[NAMES[3]]},
    ]
    candidates = list(read(folder_of(tmp_path, queries, qrels, corpus)))
    assert [question.id for question in questions(candidates)] == ["q0", "q4"]
    assert sorted(reasons(candidates)) == [
        (1, "its corpus-id '1501.00001_1.jpg' occurs twice: the first figure is used"),
        (1, "qrels names 2 figures for it: there must be one"),
        (2, "its figure 'gone.jpg' is not in the corpus"),
        (3, "qrels names 0 figures for it: there must be one"),
        (5, "its query-id 'q5' occurs twice"),
        (6, "its query-id 'q5' occurs twice"),
        (7, "it has no image"),
    ]


def test_files_are_named_by_configuration(tmp_path):
    corpus = parquet(tmp_path / "c.parquet", [{"corpus-id": 1, "image": FIGURES[NAMES[0]]}])
    queries = jsonl(tmp_path / "q.jsonl", ["not json", {**query(0), "query-id": "q0"}, {"query": "who?"}])
    qrels = jsonl(tmp_path / "r.jsonl", [{"query-id": "q0", "corpus-id": "1"}, {"query-id": "q0"}, [1]])
    source = Source(data_files=[f"corpus={corpus}", f"queries={queries}", f"qrels={qrels}"])
    candidates = list(read(source))
    assert [question.id for question in questions(candidates)] == ["q0"]
    assert [row for row, _ in reasons(candidates)] == [0, 2, 1, 2]
    assert CONVERTERS["arxivqa"].count(source) is None
