"""The right answer of a row, and whether an open answer is the same, by hand from `Stated answer` in definitions.md."""

import signal
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from math_verify import grader

from vgr_trl.errors import RewardError
from vgr_trl.rewards import Solution, accuracy_reward, equality, resolve_solution

FRUIT = ["apple", "pear", "fig"]
BY_HAND = tomllib.loads(Path(__file__).with_name("by_hand.toml").read_text("utf-8"))


def same(gold, answer):
    return accuracy_reward([f"<answer>{answer}</answer>"], [gold])[0] == 1.0


@pytest.mark.parametrize(
    ("solution", "choices", "index"),
    [
        ("c", FRUIT, 2), ("Ｂ", FRUIT, 1), ("B. pear", FRUIT, 1), (0, FRUIT, 0), (np.int32(1), FRUIT, 1),
        (" PEAR. ", FRUIT, 1), ("<answer> B </answer>", FRUIT, 1), ("B", np.array(FRUIT), 1), ("A", ["A", "B"], 0),
        (1, ["B", "A"], 1), ("2", ["1", "2", "3"], 1), ("3", [1, 3], 1), ("F", ["F", "G"], 0),
        (2.5, ["2.5", "3.5"], 0), ("Option B", ["Option B", "Option A"], 0), ("cat", ["cat.", "cat"], 1),
        ("pe\u200bar", FRUIT, 1),
    ],
)  # fmt: skip
def test_right_option(solution, choices, index):
    assert resolve_solution(solution, choices) == Solution(str(choices[index]), tuple(map(str, choices)), index)


@pytest.mark.parametrize(
    ("solution", "label_idx", "expected"),
    [
        ("12", None, Solution("12")), (12.0, 3, Solution("12")), (0.5, None, Solution("0.5")),
        ("Ｊ", None, Solution("J", (), 9)), ("(b) blue", None, Solution("B", (), 1)), ("K", None, Solution("K")),
        ("\\boxed{A}", None, Solution("A", (), 0)), (True, None, Solution("yes")),
        ("We multiply. So we get $\\boxed{42}$.", None, Solution("42")), ("6 / 2 = 3\n#### 3", None, Solution("3")),
        ("It is a dog.\nAnswer: B", None, Solution("B", (), 1)),
        (["two", "2", "two"], None, Solution("two", others=(Solution("2"),))),
        *[(text, None, Solution("two", others=(Solution("2"),))) for text in ("['two', '2']", '["two", "2"]')],
        ("['it\\'s', 2", None, Solution("['it\\'s', 2")),
        ([14, 14, 42.5], None, Solution("[14, 14, 42.5]")), ([14], None, Solution("14")),
        (None, np.int64(2), Solution("C", (), 2)),
        (None, "2", Solution("2")), ("E. coli", None, Solution("E. coli")), ("A+", None, Solution("A+")),
    ],
)  # fmt: skip
def test_right_answer_without_choices(solution, label_idx, expected):
    assert resolve_solution(solution, None, label_idx) == expected


@pytest.mark.parametrize(
    ("solution", "choices"),
    [
        *[(wrong, None) for wrong in ("<answer> </answer>", [1, "a"], [True, False], [[1, 2]], "word " * 21)],
        *[(wrong, FRUIT) for wrong in (None, float("nan"), "B. apple", "D", 3, -1, True)], ("A", ["B", "A"]),
        *[("B", choices) for choices in (
            "apple", ["x"], ["x", None], ["x", "\u200b"], ["red", "blue", " RED\n"], ["café", "cafe\u0301"],
            ["red", "re\u200bd"], ["3", "３"], list("abcdefghijk"),
        )],
    ],
)  # fmt: skip
def test_rows_that_do_not_say_what_is_right(solution, choices):
    with pytest.raises(RewardError):
        resolve_solution(solution, choices)
    assert accuracy_reward(["<answer>B</answer>"], [solution], [choices]) == [None]


@pytest.mark.parametrize("kind", BY_HAND["same"])
def test_same_answers(kind):
    assert [pair for pair in BY_HAND["same"][kind] if not same(*pair)] == []


@pytest.mark.parametrize("kind", BY_HAND["different"])
def test_different_answers(kind):
    assert [pair for pair in BY_HAND["different"][kind] if same(*pair) or (pair[1] and same(*pair[::-1]))] == []


BOMBS = [
    "9^{9^{9^9}}", "((9^{99})^{99})^{99}", "(a+b+c+d+f)^{999}", "9!!!!!!", "(" * 199, "\\binom{99999999}{9999999}",
    "{" * 50 + "}" * 50, "1e999999999", "9" * 199,
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_formula_that_would_take_forever_is_only_compared_as_text(bomb, caplog, capfd):
    """In a thread too, where no signal would end it."""
    rewards, stated = [], [f"<answer>{text}</answer>" for text in (bomb, "2^{10}", bomb)]
    thread = threading.Thread(
        target=lambda: rewards.extend(accuracy_reward(stated, ["2^{10}", bomb, bomb])), daemon=True
    )
    thread.start()
    thread.join(timeout=900)
    assert rewards == [0.0, 0.0, 1.0]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("in_thread", [False, True])
def test_slow_formulas_are_given_up(monkeypatch, in_thread):
    monkeypatch.setattr(equality, "_VERIFY_SECONDS", 0.2)
    equality.is_same_formula.cache_clear()
    rewards = []
    pairs = [("10+0", "\\sin(\\sin((0.5-i)^{13}))"), ("\\sin x + \\cos x", "x^{9999}")]
    compare = lambda: rewards.extend(same(*pair) for pair in pairs)  # noqa: E731
    if in_thread:  # where no signal comes
        thread = threading.Thread(target=compare, daemon=True)
        thread.start()
        thread.join(timeout=60)
    else:
        compare()
    assert rewards == [False, False]


def test_a_busy_machine_changes_no_reward(monkeypatch):
    """Comparing takes longer than the limit, but computes for less; other timers stay as they are."""
    compared = grader.sympy_expr_eq
    monkeypatch.setattr(grader, "sympy_expr_eq", lambda *args, **kwargs: time.sleep(2) or compared(*args, **kwargs))
    monkeypatch.setattr(equality, "_VERIFY_SECONDS", 1)
    equality.is_same_formula.cache_clear()
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert equality.is_same_formula("y^{2}+z", "z+y^{2}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
