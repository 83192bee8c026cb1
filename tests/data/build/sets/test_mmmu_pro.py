import json

import pytest
from PIL import ImageColor
from support.made_sets import parquet, picture, questions, reasons

from vgr_trl.data.public_sets import mmmu_pro_read as read
from vgr_trl.data.public_sets import renumber_placeholders
from vgr_trl.data.read import Source
from vgr_trl.utils import DataError

COLOURS = ["red", "green", "blue", "white", "black", "gray", "pink"]
PICTURES = [picture(ImageColor.getrgb(colour)) for colour in COLOURS]


def standard(**changed):
    images = {f"image_{number}": None for number in range(1, 8)} | {"image_1": PICTURES[0]}
    return {
        "id": "test_History_106",
        "question": "This cartoon from the 1949 newspaper <image 1> supports",
        "options": "['Isolationism', \"America's navy\", 'a third party', 'the union']",
        "explanation": "?",
        **images,
        "img_type": "['Comics and Cartoons']",
        "answer": "B",
        "topic_difficulty": "Medium",
        "subject": "History",
    } | changed


def vision(**changed):
    options = str([f"option {number}" for number in range(10)])
    return {
        "id": "validation_Art_1",
        "image": PICTURES[1],
        "options": options,
        "answer": "J",
        "subject": "Art",
    } | changed


def read_rows(tmp_path, *rows):
    return list(read(Source(data_files=[str(parquet(tmp_path / "rows.parquet", list(rows)))])))


def test_four_options_as_published(tmp_path):
    (found,) = questions(read_rows(tmp_path, standard()))
    assert (found.id, found.source, found.solution) == ("test_History_106", "MMMU-Pro", "B")
    assert found.problem == "This cartoon from the 1949 newspaper <image 1> supports"
    assert found.choices == ["Isolationism", "America's navy", "a third party", "the union"]
    assert found.images == [PICTURES[0]]


def test_ten_options_with_images_in_any_order(tmp_path):
    numbers = [3, 1, 7, 2, 5, 4, 6]
    options = str([f"<image {number}>" for number in numbers] + ["none", "all", "some"])
    row = standard(question="Which shows a root?", options=options, answer="C")
    row |= {f"image_{number}": PICTURES[number - 1] for number in range(1, 8)}
    (found,) = questions(read_rows(tmp_path, row))
    assert found.choices == [f"<image {number}>" for number in numbers] + ["none", "all", "some"]
    assert found.images == PICTURES  # <image k> is the k-th image
    assert found.solution == "C"


def test_a_missing_number_closes_up_in_images_and_marks(tmp_path):
    row = standard(question="Compare <image 2> with <image 5>, then <image 2>.", options="['<image 5>', '<image 2>']")
    row |= {"image_1": None, "image_2": PICTURES[1], "image_5": PICTURES[4]}
    (found,) = questions(read_rows(tmp_path, row))
    assert found.problem == "Compare <image 1> with <image 2>, then <image 1>."
    assert found.choices == ["<image 2>", "<image 1>"]
    assert found.images == [PICTURES[1], PICTURES[4]]


def test_an_image_without_a_mark_stays(tmp_path):
    (found,) = questions(read_rows(tmp_path, standard(question="What is it?", image_2=PICTURES[1])))
    assert found.images == PICTURES[:2]


def test_vision_only_keeps_its_options_in_the_image(tmp_path):
    (found,) = questions(read_rows(tmp_path, vision()))
    assert (found.source, found.choices, found.solution) == ("MMMU-Pro vision", None, "J")
    assert "option 0" not in found.problem
    assert found.images == [PICTURES[1]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (standard(question="See <image 2>."), "it refers to <image 2>, but there is no image_2"),
        (standard(options="['<image 3>', 'x']"), "it refers to <image 3>, but there is no image_3"),
        (standard(image_1=None, question="What?"), "it has no image"),
        (standard(options="[]"), "it has 0 options: there must be 2 to 10"),
        (standard(options="['a', 'b'"), "its options is \"['a', 'b'\": it must be a list, or the text of one"),
        (standard(options=str([str(n) for n in range(11)])), "it has 11 options: there must be 2 to 10"),
        (standard(answer="E"), "solution is the letter E, but there are 4 choices"),
        (standard(answer="?"), "solution is '?', which is none of the choices"),
        (standard(answer=None), "solution is None"),
        (vision(image=None), "it has no image"),
        (vision(answer="K"), "solution is the letter K, but there are 10 choices"),
        (vision(options="['x', 'y']", answer="C"), "solution is the letter C, but there are 2 choices"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, reason):
    ((_, found),) = reasons(read_rows(tmp_path, row))
    assert found.startswith(reason)


def test_backslashes_that_became_control_characters(tmp_path):
    ((_, found),) = reasons(read_rows(tmp_path, standard(options=r"['$\theta$', '$\pi$']", answer="A")))
    assert found.endswith("backslashes in it stand for control characters")


def test_options_that_are_written_with_escaped_backslashes(tmp_path):
    for options in (r"['$\\theta$', '$\\pi$']", json.dumps([r"$\theta$", r"$\pi$"])):
        (found,) = questions(read_rows(tmp_path, standard(options=options, answer="A")))
        assert found.choices == [r"$\theta$", r"$\pi$"]


def test_marks_in_other_spellings():
    assert renumber_placeholders(["<Image 3>, <image3>", "<image 12"], [3]) == ["<image 1>, <image 1>", "<image 12"]
    with pytest.raises(DataError, match="it refers to <image 99999999>"):
        renumber_placeholders(["<image 99999999>"], [1])
