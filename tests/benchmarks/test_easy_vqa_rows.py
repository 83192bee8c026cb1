"""easy-VQA becomes rows: what an image shows is told by its own questions, and families are balanced."""

from collections import Counter
from pathlib import Path

import pytest
from datasets import load_dataset

WORDS = {"colour": {"blue", "red"}, "shape": {"circle", "triangle"}}
DATA = Path(__file__).parents[3] / "shared" / "data" / "easy_vqa"


@pytest.fixture
def easy(module):
    return module("easy_vqa_rows")


def image(*pairs: tuple[str, str]) -> dict:
    return {"image_id": 7, "image": None, "questions": [q for q, _ in pairs], "answers": [a for _, a in pairs]}


@pytest.mark.parametrize(
    ("problem", "answer", "family"),
    [
        ("what color is the circle?", "blue", "colour"),
        ("what is the color of the shape?", "blue", "colour"),
        ("what is the blue shape?", "circle", "shape"),
        ("what shape is present?", "circle", "shape"),
        ("is there not a blue shape?", "no", "yes/no"),
    ],
)
def test_family(easy, problem, answer, family):
    assert easy.family_of(problem, answer) == family


@pytest.mark.parametrize(
    ("pairs", "thought"),
    [
        ([("what is the blue shape?", "circle")], "a blue circle"),
        ([("is there not a blue shape?", "no"), ("is a triangle present?", "yes")], "a blue triangle"),
        ([("is no red shape present?", "no"), ("what shape is present?", "circle")], "a red circle"),
        ([("is there a red shape?", "no"), ("what shape is present?", "circle")], None),
    ],
)
def test_what_the_questions_tell(easy, pairs, thought):
    assert easy.thought_of(image(*pairs), WORDS) == thought


def test_commonest_answer_is_taken_from_train(easy):
    train = [{"family": family, "solution": "a"} for family in easy.FAMILIES]
    test = [{"family": "colour", "solution": "a"}, {"family": "shape", "solution": "b"}]
    assert easy.commonest_answer_accuracy(train, test) == {"colour": 1.0, "shape": 0.0, "all": 0.5}


def test_commonest_answer_to_the_same_question(easy):
    train = [{"family": "yes/no", "problem": problem, "solution": "no"} for problem in ("a?", "b?")]
    train += [{"family": "yes/no", "problem": "a?", "solution": "yes"}] * 2
    test = [{"family": "yes/no", "problem": problem, "solution": "yes"} for problem in ("a?", "b?", "new?")]
    assert easy.commonest_answer_accuracy(train, test, by="problem") == {"yes/no": 1 / 3, "all": 1 / 3}


def test_mismatched_rows_keep_question_thought_and_answer(easy):
    rows = [{"image": number, "problem": number, "thought": number, "solution": number} for number in range(1000)]
    mixed = easy.mismatch_images(rows, 0.5, seed=0)
    assert [{**row, "image": number} for number, row in enumerate(mixed)] == rows
    assert 400 < sum(row["image"] != number for number, row in enumerate(mixed)) < 600
    assert easy.mismatch_images(rows, 0.0, seed=0) == rows


def test_real_data(easy):
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data/easy_vqa")
    images = list(load_dataset("parquet", data_files=str(DATA / "test.parquet"), split="train").select(range(300)))
    words = easy.vocabulary(images)
    assert (len(words["colour"]), len(words["shape"])) == (8, 3)
    rows = easy.balanced_rows(images, 90, words=words, seed=0, split="test")
    assert Counter(row["family"] for row in rows) == dict.fromkeys(easy.FAMILIES, 30)
    assert all(row["solution"] in row["thought"] for row in rows if row["family"] != "yes/no")
    assert len({row["id"] for row in rows}) == 90
    assert len(easy.text_rows(images, words=words)) > 2000
