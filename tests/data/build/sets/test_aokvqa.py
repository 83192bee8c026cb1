import pytest
from support.made_sets import parquet, picture, questions, reasons

from vgr_trl.data.public_sets import read
from vgr_trl.data.read import Source


def row(**changed):
    return {
        "image": picture(),
        "question_id": "22jbM6gDxdaMaunuzgrsBB",
        "question": "What is in the motorcyclist's mouth?",
        "choices": ["toothpick", "food", "popsicle stick", "cigarette"],
        "correct_choice_idx": 3,
        "direct_answers": "['cigarette', 'cigarette', 'cigar']",
        "difficult_direct_answer": False,
        "rationales": ["He's smoking while riding.", "The motorcyclist has a lit cigarette in his mouth."],
    } | changed


def read_rows(tmp_path, *rows):
    return list(read(Source(data_files=[str(parquet(tmp_path / "rows.parquet", list(rows)))])))


def test_a_row_as_it_is_published(tmp_path):
    (found,) = questions(read_rows(tmp_path, row()))
    assert (found.id, found.source) == ("22jbM6gDxdaMaunuzgrsBB", "A-OKVQA")
    assert found.problem == "What is in the motorcyclist's mouth?"
    assert found.choices == ["toothpick", "food", "popsicle stick", "cigarette"]
    assert found.solution == "D"
    assert found.images == [picture()]


def test_choices_as_the_text_of_a_list_and_whole_numbers_among_them(tmp_path):
    stored = row(choices="['two', 3, '4', 5.5]", correct_choice_idx=1)
    (found,) = questions(read_rows(tmp_path, stored))
    assert (found.choices, found.solution) == (["two", "3", "4", "5.5"], "B")


def test_whole_numbers_as_choices_keep_the_index_an_index(tmp_path):
    (found,) = questions(read_rows(tmp_path, row(choices=[2, 1, 0, 3], correct_choice_idx=1)))
    assert (found.choices, found.solution) == (["2", "1", "0", "3"], "B")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"image": None}, "it has no image"),
        ({"correct_choice_idx": None}, "solution is None: give the right answer as a letter A to D"),  # the test split
        ({"correct_choice_idx": -1}, "solution is the index -1, but there are 4 choices"),
        ({"correct_choice_idx": 4}, "solution is the index 4, but there are 4 choices"),
        ({"correct_choice_idx": 1.5}, "its correct_choice_idx is 1.5: it must be a whole number"),
        ({"question": "  "}, "its question is '  ': it must be a text"),
        ({"question": None}, "its question is None: it must be a text"),
        ({"choices": ["one"]}, "it has 1 options: there must be 2 to 10"),
        ({"choices": None}, "its options is None: it must be a list"),
        ({"choices": "toothpick, food"}, "its options is 'toothpick, food': it must be a list, or the text of one"),
        ({"choices": ["a cat", "", "a dog"]}, "one of its options is empty"),
        ({"choices": ["x", "y", "x "], "correct_choice_idx": 0}, "options A and C of choices are both 'x'"),
        (
            {"choices": ["B", "A", "C"], "correct_choice_idx": 0},
            "solution is 'A', which could mean option A ('B') or B",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, changed, reason):
    ((place, found),) = reasons(read_rows(tmp_path, row(**changed)))
    assert place == 0
    assert found.startswith(reason)


def test_options_that_are_alike_are_refused_even_if_both_are_wrong(tmp_path):
    ((_, found),) = reasons(read_rows(tmp_path, row(choices=["Red", "red ", "y"], correct_choice_idx=2)))
    assert found.startswith("options A and B of choices are both 'Red' (case and white space aside)")
