"""What a row's solution means, and every reason to refuse one, by hand from `Stated answer` in definitions.md."""

import re

import numpy as np
import pytest

from vgr_trl.rewards import Solution, resolve_solution
from vgr_trl.utils import RewardError

FRUIT = ["apple", "pear", "fig"]


@pytest.mark.parametrize(
    ("solution", "choices", "index"),
    [
        ("A", FRUIT, 0), ("c", FRUIT, 2), ("Ｂ", FRUIT, 1), ("(B)", FRUIT, 1), ("B.", FRUIT, 1),
        ("B. pear", FRUIT, 1),
        (0, FRUIT, 0), (2, FRUIT, 2), (2.0, FRUIT, 2), (np.int32(1), FRUIT, 1), (np.float64(1), FRUIT, 1),
        ("pear", FRUIT, 1),
        (" PEAR. ", FRUIT, 1), ("<answer> B </answer>", FRUIT, 1), ("B", tuple(FRUIT), 1),
        ("B", np.array(FRUIT), 1),
        ("A", ["A", "B"], 0), (1, ["B", "A"], 1), ("2", ["1", "2", "3"], 1), (2, ["1", "2", "3"], 2),
        ("3", [1, 3], 1),
        ("F", ["F", "G"], 0), (2.5, ["2.5", "3.5"], 0), ("A-", ["B+", "A-"], 1), ("a cat", ["x", "a cat"], 1),
        ("J", list("qrstuvwxyz"), 9), ("Option B", ["Option B", "Option A"], 0), ("cat", ["cat.", "cat"], 1),
    ],
)  # fmt: skip
def test_right_option(solution, choices, index):
    assert resolve_solution(solution, choices) == Solution(str(choices[index]), tuple(map(str, choices)), index)


@pytest.mark.parametrize(
    ("solution", "text"),
    [
        ("12", "12"),
        (12, "12"),
        (12.0, "12"),
        (0.5, "0.5"),
        (" a b ", "a b"),
        ("<answer>3</answer>", "3"),
        (np.int64(3), "3"),
    ],
)
def test_open_answer(solution, text):
    assert resolve_solution(solution) == Solution(text)


@pytest.mark.parametrize(
    ("solution", "letter", "index"),
    [
        ("B", "B", 1), ("b", "B", 1), ("Ｊ", "J", 9), ("(B)", "B", 1), ("B.", "B", 1), ("B)", "B", 1),
        ("B) blue", "B", 1),
        ("(b) blue", "B", 1), ("<answer>(C)</answer>", "C", 2), ("\\boxed{A}", "A", 0),
    ],
)  # fmt: skip
def test_letter_without_choices(solution, letter, index):
    assert resolve_solution(solution) == Solution(letter, (), index)


@pytest.mark.parametrize(
    "solution", ["K", "(K)", "K) blue", "B. blue", "B blue", "AB", "A or B", "A) red B) blue", "A-", "B) red\nC) blue"]
)
def test_open_answer_that_is_no_letter(solution):
    assert resolve_solution(solution) == Solution(solution)


@pytest.mark.parametrize(
    ("solution", "choices", "label_idx", "expected"),
    [
        (None, None, 2, Solution("C", (), 2)), (None, None, 2.0, Solution("C", (), 2)),
        (None, None, np.int64(0), Solution("A", (), 0)),
        (None, None, "C", Solution("C", (), 2)), (None, None, "2", Solution("2")),
        (None, FRUIT, 2, Solution("fig", tuple(FRUIT), 2)),
        (None, ["2", "1", "0"], 2, Solution("0", ("2", "1", "0"), 2)), (2, None, 0, Solution("2")),
        ("A", None, 1, Solution("A", (), 0)),
        (0, FRUIT, 2, Solution("apple", tuple(FRUIT), 0)),
    ],
)  # fmt: skip
def test_number_in_label_idx_is_always_an_index(solution, choices, label_idx, expected):
    assert resolve_solution(solution, choices, label_idx) == expected


@pytest.mark.parametrize("label_idx", [10, -1, 1.5, float("inf"), 10**400])
def test_label_beyond_the_letters(label_idx):
    with pytest.raises(RewardError, match=r"^label_idx is .*: without choices give an index 0 to 9$"):
        resolve_solution(None, None, label_idx)


@pytest.mark.parametrize("label_idx", [None, float("nan"), "", True, [1]])
def test_label_that_is_none(label_idx):
    with pytest.raises(RewardError, match="^solution is "):
        resolve_solution(None, None, label_idx)


@pytest.mark.parametrize("solution", [0, 2, "A", "B", "C", "red", "blue"])
@pytest.mark.parametrize("other", ["red", "Red", "RED", " red", "red ", "\tred\n"])
def test_options_that_are_alike_are_refused_whichever_is_right(solution, other):
    for choices, letters in (["red", "blue", other], "A and C"), (["blue", other, "red"], "B and C"):
        with pytest.raises(RewardError, match=f"^options {letters} of choices are both .*: give options that differ$"):
            resolve_solution(solution, choices)


def test_options_that_differ_in_more_than_case_and_space():
    choices = ["light blue", "lightblue", "light  blue.", "ligth blue"]
    assert [resolve_solution(letter, choices).index for letter in "ABCD"] == [0, 1, 2, 3]


ACCEPTED = "a letter A to C, an integer index 0 to 2, or the text of one option"


@pytest.mark.parametrize(
    ("solution", "choices", "message"),
    [
        (None, FRUIT, f"solution is None: give the right answer as {ACCEPTED}"),
        ("", None, "solution is '': give the right answer as a text or a number, or add choices"),
        (
            "<answer> </answer>",
            None,
            "solution is '<answer> </answer>': give the right answer as a text or a number, or add",
        ),
        (float("nan"), FRUIT, f"solution is nan: give the right answer as {ACCEPTED}"),
        (float("-inf"), None, "solution is -inf: give a finite number, or a text"),
        (float("inf"), FRUIT, f"solution is 'inf', which is none of the choices: give {ACCEPTED}"),
        ("kiwi", FRUIT, f"solution is 'kiwi', which is none of the choices: give {ACCEPTED}"),
        ("1", FRUIT, f"solution is '1', which is none of the choices: give {ACCEPTED}"),
        ("A or B", FRUIT, f"solution is 'A or B', which is none of the choices: give {ACCEPTED}"),
        ("B. apple", FRUIT, f"solution is 'B. apple', which is none of the choices: give {ACCEPTED}"),
        (1.5, FRUIT, f"solution is '1.5', which is none of the choices: give {ACCEPTED}"),
        ("D", FRUIT, f"solution is the letter D, but there are 3 choices: give {ACCEPTED}"),
        ("k", FRUIT, f"solution is the letter K, but there are 3 choices: give {ACCEPTED}"),
        (3, FRUIT, f"solution is the index 3, but there are 3 choices: give {ACCEPTED}"),
        (-1, FRUIT, f"solution is the index -1, but there are 3 choices: give {ACCEPTED}"),
        (True, FRUIT, f"solution is True (bool): give {ACCEPTED}"),
        (np.bool_(True), None, "solution is np.True_ (bool): give a text or a number, or add choices"),
        (["B"], FRUIT, f"solution is ['B'] (list): give {ACCEPTED}"),
        (10**18, None, "solution is an integer of more than 18 digits: give it as a text"),
        (
            "A",
            ["B", "A"],
            "solution is 'A', which could mean option A ('B') or B ('A'): give the index of the right option",
        ),
        (
            "fig",
            ["fig.", "Pear", "fig,"],
            "solution is 'fig', which could mean option A ('fig.') or C ('fig,'): give the index",
        ),
        ("B", [], "choices has 0 options: give 2 to 10, or None for an open question"),
        ("B", ["x"], "choices has 1 options: give 2 to 10, or None for an open question"),
        ("B", list("abcdefghijk"), "choices has 11 options: give 2 to 10, or None for an open question"),
        ("B", "apple", "choices is 'apple' (str): give a list of option texts"),
        ("B", {"a": 1}, "choices is {'a': 1} (dict): give a list of option texts"),
        ("B", ["x", None], "option B of choices is None: give every option a text"),
        ("B", ["", "y"], "option A of choices is '': give every option a text"),
        ("x" * 200, FRUIT, "solution is '" + "x" * 76 + "..., which is none of the choices"),
    ],
)
def test_reasons_to_refuse_a_row(solution, choices, message):
    with pytest.raises(RewardError, match="^" + re.escape(message)):
        resolve_solution(solution, choices)
