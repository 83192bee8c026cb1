"""Converters of public sets and of the user's files, choice of ids, and options in another order."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor
from support.made_sets import jsonl, parquet, picture, questions, reasons, rows_in, skipped_in

from vgr_trl.cli.__main__ import main
from vgr_trl.data.columns import Keys, Origin, Question, renumber_placeholders
from vgr_trl.data.load import load_split
from vgr_trl.data.public_sets import (
    CONVERTERS,
    jsonl_read,
    keep_ids,
    read_ids,
    shuffled_choices,
    stays_in_order,
)
from vgr_trl.data.read import Source
from vgr_trl.data.rows import prepare_rows
from vgr_trl.utils import DataError

COLOURS = ["red", "green", "blue", "white", "black", "gray", "pink"]
PICTURES = [picture(ImageColor.getrgb(colour)) for colour in COLOURS]
LETTERS = "ABCDEFGHIJ"
NUMBERED = {f"image_{number}": None for number in range(1, 8)}

AOKVQA = {
    "image": picture(),
    "question_id": "22jbM6gDxdaMaunuzgrsBB",
    "question": "What is in the motorcyclist's mouth?",
    "choices": ["toothpick", "food", "popsicle stick", "cigarette"],
    "correct_choice_idx": 3,
    "direct_answers": "['cigarette', 'cigarette', 'cigar']",
    "difficult_direct_answer": False,
    "rationales": ["He's smoking while riding."],
}
MMMU = {
    "id": "test_History_106",
    "question": "This cartoon from the 1949 newspaper <image 1> supports",
    "options": "['Isolationism', \"America's navy\", 'a third party', 'the union']",
    "explanation": "?",
    **NUMBERED,
    "image_1": PICTURES[0],
    "answer": "B",
    "subject": "History",
}
VISION = {
    "id": "validation_Art_1",
    "image": PICTURES[1],
    "options": str([f"option {number}" for number in range(10)]),
    "answer": "J",
    "subject": "Art",
}
EASY = {"image_id": 7, "image": picture(), "questions": ["what colour?", "is it red?"], "answers": ["red", "yes"]}
NLVR = {"identifier": "1-0", "image": picture(), "sentence": " There is a box. ", "label": "true", "objects": None}


def read(name, folder, *rows):
    return list(CONVERTERS[name].read(Source(data_files=[str(parquet(folder / "train.parquet", list(rows)))])))


def fields(question: Question):
    return question.id, question.source, question.problem, question.choices, question.solution, question.images


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (
            "aokvqa",
            AOKVQA,
            ("22jbM6gDxdaMaunuzgrsBB", "A-OKVQA", AOKVQA["question"], AOKVQA["choices"], "D", [picture()]),
        ),
        (
            "mmmu_pro",
            MMMU,
            ("test_History_106", "MMMU-Pro", MMMU["question"],
             ["Isolationism", "America's navy", "a third party", "the union"], "B", PICTURES[:1]),
        ),
        (
            "mmmu_pro",
            VISION,
            ("validation_Art_1", "MMMU-Pro vision",
             "Answer the multiple-choice question in the image with the letter of the right option.", None, "J",
             [PICTURES[1]]),
        ),
        (
            "nlvr",
            NLVR,
            ("1-0", "NLVR", "Is this statement about the image true or false? There is a box.", ["true", "false"], "A",
             [picture()]),
        ),
    ],
)  # fmt: skip
def test_rows_as_they_are_published(tmp_path, name, row, expected):
    (found,) = questions(read(name, tmp_path, row))
    assert fields(found) == expected


def test_choices_of_a_okvqa_in_other_forms(tmp_path):
    """An index is an index, though an option's text is 1."""
    for choices, texts in (("['two', 3, '4', 5.5]", ["two", "3", "4", "5.5"]), ([2, 1, 0, 3], ["2", "1", "0", "3"])):
        (found,) = questions(read("aokvqa", tmp_path, {**AOKVQA, "choices": choices, "correct_choice_idx": 1}))
        assert (found.choices, found.solution) == (texts, "B")


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("aokvqa", AOKVQA | {"image": None}, "it has no image"),
        ("aokvqa", AOKVQA | {"correct_choice_idx": None}, "solution is None"),  # the test split
        ("aokvqa", AOKVQA | {"correct_choice_idx": 4}, "solution is the index 4, but there are 4 choices"),
        ("aokvqa", AOKVQA | {"question": "  "}, "its question is '  ': it must be a text"),
        ("aokvqa", AOKVQA | {"choices": None}, "it has no options"),
        ("aokvqa", AOKVQA | {"choices": ["Red", "red ", "y"], "correct_choice_idx": 2}, "options A and B of choices"),
        ("aokvqa", AOKVQA | {"choices": ["B", "A", "C"], "correct_choice_idx": 0}, "solution is 'A', which could mean"),
        ("mmmu_pro", MMMU | {"question": "See <image 2>."}, "it refers to <image 2>, but there is no image_2"),
        ("mmmu_pro", MMMU | {"options": r"['$\theta$', '$\pi$']"}, "its options is "),  # \t is a control character
        ("mmmu_pro", MMMU | {"answer": "E"}, "solution is the letter E, but there are 4 choices"),
        ("mmmu_pro", VISION | {"answer": "K"}, "solution is the letter K, but there are 10 choices"),
        ("nlvr", NLVR | {"label": "perhaps"}, "solution is 'perhaps', which is none of"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, name, row, reason):
    ((place, found),) = reasons(read(name, tmp_path, row))
    assert place == 0
    assert found.startswith(reason)


def test_ten_options_with_images_in_any_order(tmp_path):
    numbers = [3, 1, 7, 2, 5, 4, 6]
    options = [f"<image {number}>" for number in numbers] + ["none", "all", "some"]
    row = MMMU | {"question": "Which shows a root?", "options": str(options), "answer": "C"}
    (found,) = questions(read("mmmu_pro", tmp_path, row | dict(zip(NUMBERED, PICTURES, strict=True))))
    assert (found.choices, found.solution, found.images) == (options, "C", PICTURES)  # <image k> is the k-th image


def test_a_missing_number_closes_up_in_images_and_placeholders(tmp_path):
    row = MMMU | {"image_1": None, "image_2": PICTURES[1], "image_5": PICTURES[4]}
    row |= {"question": "Compare <image 2> with <image 5>, then <image 2>.", "options": "['<image 5>', '<image 2>']"}
    (found,) = questions(read("mmmu_pro", tmp_path, row))
    assert found.problem == "Compare <image 1> with <image 2>, then <image 1>."
    assert (found.choices, found.images) == (["<image 2>", "<image 1>"], [PICTURES[1], PICTURES[4]])
    assert renumber_placeholders(["<Image 3>, <image3>", "<image 12"], [3]) == ["<image 1>, <image 1>", "<image 12"]
    with pytest.raises(DataError, match="it refers to <image 99999999>"):
        renumber_placeholders(["<image 99999999>"], [1])


def test_easy_vqa_has_several_questions_to_an_image(tmp_path):
    rows = [EASY, EASY | {"answers": ["red"]}, EASY | {"questions": None}, EASY | {"answers": ["red", None]}]
    found = read("easy_vqa", tmp_path, *rows)
    assert [(item.id, item.problem, item.solution, item.choices) for item in questions(found)] == [
        ("train-7-0", "what colour?", "red", None),
        ("train-7-1", "is it red?", "yes", None),
        ("train-7-0", "what colour?", "red", None),  # the other question of the last row stays
    ]
    assert [(row, reason[:30]) for row, reason in reasons(found)] == [
        (1, "it has 2 questions and 1 answe"),
        (2, "its questions is None: it must"),
        (3, "solution is None: give the rig"),
    ]


def test_nlvr_has_labels_of_two_types_and_boxes_of_objects(tmp_path):
    for label, letter in ((False, "B"), (True, "A")):
        assert questions(read("nlvr", tmp_path, NLVR | {"label": label}))[0].solution == letter
    wide, high = Image.open(io.BytesIO(picture()["bytes"])).size
    boxes = [{"box": [0, high / 2, wide / 4, high / 2]}, {"box": [wide / 2, 0, wide / 2, high]}]
    (found,) = questions(read("nlvr", tmp_path, NLVR | {"objects": json.dumps(boxes)}))
    assert found.regions == [[0, 0.5, 0.25, 0.5], [0.5, 0, 0.5, 1]]
    for unreadable in ("[]", "{", '[{"type": "circle"}]'):
        assert questions(read("nlvr", tmp_path, NLVR | {"objects": unreadable}))[0].regions == []


FIGURES = {f"1501.0000{number}_1.jpg": picture((number, 0, 0)) for number in range(1, 5)}
NAMES = list(FIGURES)


def query(number: int, **changed):
    options = ["A) It rises", "B) It falls", "C) It stays", "D) It vanishes"]
    row = {"query-id": f"q{number}", "query": f"What does curve {number} do?", "options": options, "answer": "B"}
    return row | changed


def arxivqa(folder: Path, queries, qrels=None, corpus=None) -> Source:
    corpus = [{"corpus-id": name, "image": image} for name, image in FIGURES.items()] if corpus is None else corpus
    if qrels is None:
        pairs = enumerate(row["query-id"] for row in queries)
        qrels = [{"query-id": name, "corpus-id": NAMES[number % 4], "score": 1} for number, name in pairs]
    for name, rows in (("corpus", corpus), ("queries", queries), ("qrels", qrels)):
        parquet(folder / "set" / name / "train-00000-of-00001.parquet", rows)
    return Source(dataset_path=str(folder / "set"))


def test_questions_of_arxivqa_get_their_figures(tmp_path):
    source = arxivqa(tmp_path, [query(0), query(1), query(2), query(3), query(4, answer="D")])
    found = questions(CONVERTERS["arxivqa"].read(source))
    # In the order of the figures: the first figure is asked about by the questions 0 and 4.
    assert [question.id for question in found] == ["q0", "q4", "q1", "q2", "q3"]
    assert [question.images for question in found] == [[FIGURES[NAMES[number]]] for number in (0, 0, 1, 2, 3)]
    assert [question.solution for question in found] == ["B", "D", "B", "B", "B"]
    assert found[0].choices == ["It rises", "It falls", "It stays", "It vanishes"]
    assert (found[0].source, found[0].problem) == ("ArxivQA", "What does curve 0 do?")


@pytest.mark.parametrize(
    ("changed", "choices", "solution"),
    [
        ({"answer": "(B)"}, None, "B"),
        ({"answer": 1}, None, "B"),
        ({"options": "['10', '20']", "answer": "A"}, ["10", "20"], "A"),
        ({"options": ["A: x", "B: y"], "answer": "A"}, ["x", "y"], "A"),
        ({"options": ["A) x", "y"], "answer": "A"}, ["A) x", "y"], "A"),  # only one carries its letter
        ({"options": ["B) x", "A) y"], "answer": "A"}, None, "its options carry the letters B, A, which are not"),
        ({"options": [2, 1, 3, 0], "answer": 2}, None, "its solution (or answer) is the number 2, which is one"),
    ],
)
def test_options_and_answers_in_the_forms_that_occur(tmp_path, changed, choices, solution):
    ((_, found),) = CONVERTERS["arxivqa"].read(arxivqa(tmp_path, [query(0, **changed)]))
    if isinstance(found, str):
        assert found.startswith(solution)
    else:
        assert found.solution == solution
        assert choices is None or found.choices == choices


def test_what_cannot_be_joined_is_listed(tmp_path):
    queries = [query(number) for number in range(6)] + [query(5, answer="C"), query(7)]
    pairs = [("q0", 0, 1), ("q1", 0, 1), ("q1", 1, 1), ("q2", None, 1), ("q3", 0, 0), ("q4", 3, 1), ("q7", 1, 1)]
    qrels = [
        {"query-id": name, "corpus-id": "gone.jpg" if figure is None else NAMES[figure], "score": score}
        for name, figure, score in pairs
    ]
    corpus = [
        {"corpus-id": NAMES[0], "image": FIGURES[NAMES[0]]},
        {"corpus-id": NAMES[0], "image": FIGURES[NAMES[1]]},
        {"corpus-id": NAMES[1], "image": None},
        {"corpus-id": NAMES[3], "image": FIGURES[NAMES[3]]},
    ]
    candidates = list(CONVERTERS["arxivqa"].read(arxivqa(tmp_path, queries, qrels, corpus)))
    assert [question.id for question in questions(candidates)] == ["q0", "q4"]
    assert sorted(reasons(candidates)) == [
        (1, "its query-id 'q1' occurs 1 times, with 2 figures in qrels"),
        (2, "its figure 'gone.jpg' is not in the corpus"),
        (3, "its query-id 'q3' occurs 1 times, with 0 figures in qrels"),
        (5, "its query-id 'q5' occurs 2 times, with 0 figures in qrels"),
        (6, "its query-id 'q5' occurs 2 times, with 0 figures in qrels"),
        (7, "it has no image"),
    ]


def test_the_tables_as_named_files(tmp_path):
    corpus = parquet(tmp_path / "c.parquet", [{"corpus-id": 1, "image": FIGURES[NAMES[0]]}])
    queries = jsonl(tmp_path / "q.jsonl", ["not json", {**query(0), "query-id": "q0"}, {"query": "who?"}])
    qrels = jsonl(tmp_path / "r.jsonl", [{"query-id": "q0", "corpus-id": "1"}, {"query-id": "q0"}, [1]])
    source = Source(data_files=[f"corpus={corpus}", f"queries={queries}", f"qrels={qrels}"])
    candidates = list(CONVERTERS["arxivqa"].read(source))
    assert [question.id for question in questions(candidates)] == ["q0"]
    assert [row for row, _ in reasons(candidates)] == [0, 2, 1, 2]


def own(folder, *rows, **options):
    return list(jsonl_read(Source(data_files=[str(jsonl(folder / "mine.jsonl", list(rows)))]), **options))


def test_own_files_with_known_columns_and_with_others(tmp_path):
    row = {"prompt": "How many?", "answer": 3, "images": ["a.png", "b/c.png", f"{tmp_path}/d.png"]}
    (found,) = questions(own(tmp_path, row))
    images = [str(tmp_path / name) for name in ("a.png", "b/c.png", "d.png")]
    assert fields(found) == ("mine.jsonl-0", "mine", "How many?", None, "3", images)
    row = {"frage": "Which?", "antwort": "two", "bild": "a.png", "wahl": ["one", "two"], "prompt": "no", "answer": "no"}
    keys = Keys(prompt=("frage",), answer=("antwort",), image=("bild",), choices=("wahl",))
    (found,) = questions(own(tmp_path, row, keys=keys, image_dir=tmp_path / "images"))
    image = str(tmp_path / "images" / "a.png")
    assert fields(found)[2:] == ("Which?", ["one", "two"], "B", [image])
    talk = {"prompt": [{"role": "user", "content": "What?"}], "answer": "x", "image": "a.png"}
    assert questions(own(tmp_path, talk))[0].problem == "What?"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": float("inf")}, "solution is inf: give the right answer"),
        ({"choices": ["x", {"a": 1}]}, "one of its options is {'a': 1}: options must be texts or numbers"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "its prompt is a conversation: a converted row has a text"),
    ],
)
def test_own_rows_that_cannot_be_converted(tmp_path, row, reason):
    """Those that `train` and `inspect` refuse as well are in test_readers_agree.py."""
    ((_, found),) = reasons(own(tmp_path, {"prompt": "q", "answer": "a", "images": ["a.png"]} | row))
    assert found.startswith(reason)


def test_videos_are_paths_that_exist(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"film")
    rows = [{"prompt": "q", "answer": "a", "videos": name} for name in ("a.mp4", ["a.mp4"], "b.mp4", 5, "x" * 999)]
    found = own(tmp_path, *rows)
    assert [(item.images, item.videos) for item in questions(found)] == [([], [str(tmp_path / "a.mp4")])] * 2
    assert [reason[:33] for _, reason in reasons(found)] == [
        f"video file {tmp_path}/b.mp4 does not exist"[:33],
        "video file 5 does not exist",
        f"video file {tmp_path}/{'x' * 999}"[:33],
    ]


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="needs the two published sets beside the project")
def test_merged_questions_of_one_image_of_published_sets_stay_on_one_side(tmp_path):
    for name, split in (("easy_vqa", "test"), ("nlvr", "dev")):
        where = ["--dataset_path", str(DATA / name), "--split", split, "--output_dir", str(tmp_path / name)]
        assert main(["data", "convert", name, *where, "--workers", "0", "--subset_size", "100"]) == 0
    sets = [str(tmp_path / name) for name in ("easy_vqa:test", "nlvr:validation")]
    assert main(["data", "merge", *sets, "--output_dir", str(tmp_path / "out"), "--workers", "0"]) == 0
    sides = {split: rows_in(tmp_path / "out", split) for split in ("train", "test")}
    images = {split: {row["image"]["bytes"] for row in rows} for split, rows in sides.items()}
    assert not images["train"] & images["test"]
    left = 200 - len(skipped_in(tmp_path / "out"))
    assert len(sides["train"]) + len(sides["test"]) == left
    assert len(sides["test"]) == pytest.approx(left / 10, abs=1)
    rows, skipped = prepare_rows(load_split("test", dataset_path=str(tmp_path / "out")), split="test")
    assert (len(rows), skipped) == (len(sides["test"]), [])


@pytest.mark.parametrize(
    ("text", "ids"), [("\ufeffa\r\n b \n\nc", {"a", "b", "c"}), ('["a", 7]', {"a", "7"}), ("7", {"7"})]
)
def test_ids_per_line_or_as_json(tmp_path, text, ids):
    (tmp_path / "ids").write_bytes(text.encode())
    assert read_ids(tmp_path / "ids") == ids


def test_reasons_pass():
    rows = [(Origin("f", 0), "bad"), *((Origin("f", 1), Question(name, "s", "p", "x", ["i"])) for name in "abc")]
    kept = keep_ids(rows, {"c", "a", "z"})
    assert [found if isinstance(found, str) else found.id for _, found in kept] == ["bad", "a", "c"]


def asked(choices=tuple(COLOURS[:4]), solution="A", problem="Which colour?") -> Question:
    return Question("q", "made", problem, solution, ["image"], list(choices) if choices else None)


def shuffled(given, seed=0):
    return [found for _, found in shuffled_choices(((Origin("f", 0), item) for item in given), seed)]


def test_right_letters_come_equally_often():
    many = [asked()] * 100 + [asked(COLOURS[:3])] * 30
    found = shuffled(many)
    assert Counter(item.solution for item in found[:100]) == dict.fromkeys("ABCD", 25)
    assert Counter(item.solution for item in found[100:]) == dict.fromkeys("ABC", 10)
    places = Counter(item.choices.index("blue") for item in found[:100])
    assert all(10 <= places[place] <= 45 for place in range(4))  # wrong options move too
    assert shuffled(many) == found != shuffled(many, seed=1)


@given(count=st.integers(2, 10), right=st.integers(0, 9), seed=st.integers(0, 3))
def test_the_right_option_stays_right_and_none_is_lost(count, right, seed):
    choices = [f"option-{number}" for number in range(count)]
    before = asked(choices, LETTERS[right % count])
    (after,) = shuffled([before], seed)
    assert after.choices[LETTERS.index(after.solution)] == choices[right % count]
    assert sorted(after.choices) == sorted(choices)
    assert (after.id, after.problem, after.images) == (before.id, before.problem, before.images)


@pytest.mark.parametrize(
    ("problem", "last", "stays"),
    [
        ("Which?", "None of the above", True),
        ("Which?", "Both A and B", True),
        ("Which?", "only B", True),
        ("Which?", "B", True),
        ("Is option B larger than option C?", "teal", True),
        ("Which?", "Vitamin A", False),
    ],
)
def test_options_that_name_others_stay(problem, last, stays):
    question = asked([*COLOURS[:3], last], "B", problem)
    assert stays_in_order(question) is stays
    assert not stays or shuffled([question, "bad", asked(None, "red")]) == [question, "bad", asked(None, "red")]
