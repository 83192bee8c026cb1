"""The converters of the two sets that the benchmarks of this project use."""

import io
import json

from PIL import Image
from support.made_sets import parquet, picture, questions, reasons

from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source

EASY = {"image_id": 7, "image": picture(), "questions": ["what colour?", "is it red?"], "answers": ["red", "yes"]}
NLVR = {"identifier": "1-0", "image": picture(), "sentence": " There is a box. ", "label": "true", "objects": None}


def read(name, tmp_path, *rows):
    return list(CONVERTERS[name].read(Source(data_files=[str(parquet(tmp_path / "train.parquet", list(rows)))])))


def test_easy_vqa_has_several_questions_to_an_image(tmp_path):
    found = questions(read("easy_vqa", tmp_path, EASY))
    assert [(item.id, item.problem, item.solution, item.choices) for item in found] == [
        ("train-7-0", "what colour?", "red", None),
        ("train-7-1", "is it red?", "yes", None),
    ]
    assert found[0].images == found[1].images == [picture()]


def test_easy_vqa_rows_that_cannot_be_used(tmp_path):
    rows = [
        EASY | {"answers": ["red"]},
        EASY | {"questions": [], "answers": []},
        EASY | {"questions": None},
        EASY | {"image": None},
        EASY | {"answers": ["red", None]},
    ]
    found = read("easy_vqa", tmp_path, *rows)
    assert [(row, reason) for row, reason in reasons(found)] == [
        (0, "it has 2 questions and 1 answers: there must be as many of both"),
        (1, "it has 0 questions and 0 answers: there must be as many of both"),
        (2, "its questions is None: it must be a list, or the text of one"),
        (3, "it has no image"),
        (3, "it has no image"),
        (4, "solution is None: give the right answer as a text or a number, or add choices"),
    ]
    assert [item.problem for item in questions(found)] == ["what colour?"]  # the other question of the last row stays


def test_nlvr_asks_for_true_or_false(tmp_path):
    (found,) = questions(read("nlvr", tmp_path, NLVR))
    assert found.problem == "Is this statement about the image true or false? There is a box."
    assert (found.id, found.choices, found.solution) == ("1-0", ["true", "false"], "A")
    for label, letter in ((False, "B"), (True, "A")):
        assert questions(read("nlvr", tmp_path, NLVR | {"label": label}))[0].solution == letter


def test_nlvr_says_where_its_objects_are(tmp_path):
    wide, high = Image.open(io.BytesIO(picture()["bytes"])).size
    boxes = [{"box": [0, high / 2, wide / 4, high / 2]}, {"box": [wide / 2, 0, wide / 2, high]}]
    (found,) = questions(read("nlvr", tmp_path, NLVR | {"objects": json.dumps(boxes)}))
    assert found.regions == [[0, 0.5, 0.25, 0.5], [0.5, 0, 0.5, 1]]
    for unreadable in (None, "[]", "{", '[{"box": [1, 2]}]', '[{"type": "circle"}]'):
        (found,) = questions(read("nlvr", tmp_path, NLVR | {"objects": unreadable}))
        assert found.regions == []


def test_nlvr_rows_that_cannot_be_used(tmp_path):
    rows = [NLVR | {"label": "perhaps"}, NLVR | {"label": None}, NLVR | {"sentence": ""}, NLVR | {"image": None}]
    assert [reason[:40] for _, reason in reasons(read("nlvr", tmp_path, *rows))] == [
        "solution is 'perhaps', which is none of ",
        "solution is None: give the right answer ",
        "its sentence is '': it must be a text",
        "it has no image",
    ]
