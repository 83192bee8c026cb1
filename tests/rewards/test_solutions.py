"""What a row's solution means, and every reason to refuse one, by hand from `Stated answer` in definitions.md."""

import re

import numpy as np
import pytest

from vgr_trl.errors import RewardError
from vgr_trl.rewards import Solution, resolve_solution

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
            ["fig", "Pear", "fig"],
            "solution is 'fig', which could mean option A ('fig') or C ('fig'): give the index",
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
