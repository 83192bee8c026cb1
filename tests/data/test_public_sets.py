import io
import json

import pytest
from datasets import Dataset
from PIL import Image, ImageColor
from support.made_sets import converted, parquet, picture

from vgr_trl.data.convert import join_arxivqa, read_ids, shuffle_choices, stays_in_order
from vgr_trl.data.load import load_split
from vgr_trl.data.read_row import VISION_ONLY_PROBLEM, renumber_placeholders
from vgr_trl.errors import DataError

COLOURS = ["red", "green", "blue", "white", "black", "gray", "pink"]
PICTURES = [picture(ImageColor.getrgb(colour)) for colour in COLOURS]
NUMBERED = {f"image_{number}": None for number in range(1, 8)}

AOKVQA = {"image": picture(), "question_id": "22jb", "question": "What is in the mouth?", "correct_choice_idx": 3}
AOKVQA |= {"choices": ["toothpick", "food", "popsicle stick", "cigarette"], "direct_answers": "['cigarette', 'cigar']"}
MMMU = {"id": "test_1", "question": "This cartoon <image 1> supports", "answer": "B", "subject": "History", **NUMBERED}
MMMU |= {"image_1": PICTURES[0], "options": "['Isolationism', \"America's navy\", 'a third party', 'the union']"}
TEN = str([f"o{n}" for n in range(10)])
VISION = {"id": "val_1", "image": PICTURES[1], "options": TEN, "answer": "J", "subject": "Art"}
EASY = {"image_id": 7, "image": picture(), "questions": ["what colour?", "is it red?"], "answers": ["red", "yes"]}
STATEMENT = "Is this statement about the image true or false? "
NLVR = {"identifier": "1-0", "image": picture(), "sentence": " There is a box. ", "label": "true", "objects": None}
NAVY = ["Isolationism", "America's navy", "a third party", "the union"]
FIGURES = {f"1501.0000{number}_1.jpg": picture((number, 0, 0)) for number in range(1, 5)}
NAMES = list(FIGURES)


def read(name, folder, *rows):
    return converted(name, parquet(folder / "train.parquet", list(rows)))


def fields(row):
    return row["id"], row["source"], row["problem"], row["choices"], row["solution"], row["images"]


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("aokvqa", AOKVQA, ("22jb", "A-OKVQA", AOKVQA["question"], AOKVQA["choices"], "D", [picture()])),
        ("mmmu_pro", MMMU, ("test_1", "MMMU-Pro", MMMU["question"], NAVY, "B", PICTURES[:1])),
        ("mmmu_pro", VISION, ("val_1", "MMMU-Pro vision", VISION_ONLY_PROBLEM, None, "J", [PICTURES[1]])),
        ("nlvr", NLVR, ("1-0", "NLVR", STATEMENT + "There is a box.", ["true", "false"], "A", [picture()])),
    ],
)
def test_rows_as_they_are_published(tmp_path, name, row, expected):
    ((found,), _) = read(name, tmp_path, row)
    assert fields(found) == expected


def test_a_missing_number_closes_up_in_images_and_placeholders(tmp_path):
    row = MMMU | {"image_1": None, "image_2": PICTURES[1], "image_5": PICTURES[4]}
    row |= {"question": "Compare <image 2> with <image 5>, then <image 2>.", "options": "['<image 5>', '<image 2>']"}
    ((found,), _) = read("mmmu_pro", tmp_path, row)
    assert found["problem"] == "Compare <image 1> with <image 2>, then <image 1>."
    assert (found["choices"], found["images"]) == (["<image 2>", "<image 1>"], [PICTURES[1], PICTURES[4]])
    assert renumber_placeholders(["<Image 3>, <image3>", "<image 12"], [3]) == ["<image 1>, <image 1>", "<image 12"]
    with pytest.raises(DataError):
        renumber_placeholders(["<image 99999999>"], [1])


def test_easy_vqa_has_several_questions_to_an_image(tmp_path):
    rows = [EASY, EASY | {"answers": ["red"]}, EASY | {"questions": None}, EASY | {"answers": ["red", None]}]
    found, left_out = read("easy_vqa", tmp_path, *rows)
    asked = [(row["id"], row["problem"], row["solution"], row["choices"]) for row in found]
    colour = ("7-0", "what colour?", "red", None)
    assert asked == [colour, ("7-1", "is it red?", "yes", None), colour]  # one question of the last row stays
    assert [(row, reason[:10]) for row, reason in left_out] == [(1, "it has 2 q"), (2, "its questi"), (3, "solution i")]


def test_nlvr_has_labels_of_two_types_and_boxes_of_objects(tmp_path):
    for label, letter in ((False, "B"), (True, "A")):
        assert read("nlvr", tmp_path, NLVR | {"label": label})[0][0]["solution"] == letter
    wide, high = Image.open(io.BytesIO(picture()["bytes"])).size
    boxes = [{"box": [0, high / 2, wide / 4, high / 2]}, {"box": [wide / 2, 0, wide / 2, high]}]
    ((found,), _) = read("nlvr", tmp_path, NLVR | {"objects": json.dumps(boxes)})
    assert found["regions"] == [[0, 0.5, 0.25, 0.5], [0.5, 0, 0.5, 1]]
    for unreadable in ("[]", "{", '[{"type": "circle"}]'):
        assert read("nlvr", tmp_path, NLVR | {"objects": unreadable})[0][0]["regions"] == []


def query(number: int, **changed):
    options = ["A) It rises", "B) It falls", "C) It stays", "D) It vanishes"]
    row = {"query-id": f"q{number}", "query": f"What does curve {number} do?", "options": options, "answer": "B"}
    return row | changed


def test_questions_of_arxivqa_get_their_figures(tmp_path):
    queries = [query(0), query(1), query(2), query(3, options=["B) x", "A) y"]), query(4, answer="D) It vanishes")]
    queries += [query(5), query(6), query(6)]  # without a figure, and twice
    qrels = [{"query-id": f"q{number}", "corpus-id": NAMES[number % 4], "score": 1} for number in range(5)]
    corpus = [{"corpus-id": name, "image": image} for name, image in FIGURES.items()]
    for name, rows in (("corpus", corpus), ("queries", queries), ("qrels", qrels)):
        parquet(tmp_path / "set" / name / "train-00000-of-00001.parquet", rows)
    joined = join_arxivqa(lambda name: load_split("train", dataset_path=str(tmp_path / "set"), dataset_config=name))
    found, left_out = converted("arxivqa", joined)
    # In the order of the figures: the first figure is asked about by the questions 0 and 4.
    assert [row["id"] for row in found] == ["q0", "q4", "q1", "q2"]
    assert [row["images"] for row in found] == [[FIGURES[NAMES[number]]] for number in (0, 0, 1, 2)]
    assert [row["solution"] for row in found] == ["B", "D", "B", "B"]
    assert found[0]["choices"] == ["It rises", "It falls", "It stays", "It vanishes"]
    assert (found[0]["source"], found[0]["problem"]) == ("ArxivQA", "What does curve 0 do?")
    unclear = "its query-id occurs twice, or it does n"
    expected = [(4, "its options carry the letters B, A inst"), *((place, unclear) for place in (5, 6, 7))]
    assert [(place, reason[:39]) for place, reason in left_out] == expected


def test_ids_per_line_or_as_json(tmp_path):
    for text, ids in (("\ufeffa\r\n b \n\nc", {"a", "b", "c"}), ('["a", 7]', {"a", "7"}), ("7", {"7"})):
        (tmp_path / "ids").write_bytes(text.encode())
        assert read_ids(tmp_path / "ids") == ids


def asked(choices=tuple(COLOURS[:4]), solution="A", problem="Which colour?"):
    return {"problem": problem, "solution": solution, "choices": list(choices) if choices else None}


def shuffled(given, seed=0):
    return list(shuffle_choices(Dataset.from_list(given), [range(len(given))], seed))


@pytest.mark.parametrize(
    ("last", "stays"),
    [("None of the above", True), ("Both A and B", True), ("only B", True), ("B", True), ("Vitamin A", False)],
)
def test_options_that_name_others_stay(last, stays):
    row = asked([*COLOURS[:3], last], "B")
    assert stays_in_order(row["problem"], row["choices"]) is stays
    assert not stays or shuffled([row, asked(None, "red")]) == [row, asked(None, "red")]
    assert stays_in_order("Is option B larger than option C?", COLOURS)
