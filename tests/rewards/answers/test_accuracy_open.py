"""Open answers: numbers, formulas and texts, by hand from `Stated answer` in definitions.md."""

import signal
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import grader

from vgr_trl.rewards import accuracy_reward
from vgr_trl.rewards import answers as formulas


def reward(answer, gold):
    return accuracy_reward([f"<answer>{answer}</answer>"], [gold])[0]


SAME = [
    ("12", "12"), ("12", "12.0"), ("12", "１２"), ("12", "$12$"), ("12", "12."), ("12", "\\boxed{12}"),
    (12, "12"), (2.0, "2"), ("1/2", "0.5"), ("0.5", "\\frac{1}{2}"), ("1/3", "0.333333"), ("1,000", "1000"),
    ("1e5", "100000"), ("-5", "−5"), ("50%", "0.5"), ("50%", "50 percent"), ("12 cm", "12"), ("12", "12 cm"),
    ("$5", "5"), ("30°", "30"), ("1.5×10^3", "1500"), ("2^10", "1024"),
    ("\\sqrt{8}", "2\\sqrt{2}"), ("sqrt(2)", "\\sqrt{2}"), ("2\\pi", "2π"), ("x+1", "1+x"),
    ("x^2-1", "(x-1)(x+1)"), ("2^{-1}", "1/2"), ("\\frac{x+1}{2}", "(x+1)/2"), ("x=5", "5"), ("5", "x = 5"),
    ("1\\frac{1}{2}", "1.5"), ("x>5", "5<x"), ("\\{1,2\\}", "\\{2,1\\}"), ("1, 2", "1,2"),
    ("Blue Dog", " blue\n dog. "), ("on", "ON!"), ("猫", "猫。"), ("A", "a"), ("<answer> 3 </answer>", "3"),
    ("ＡＢ", "ab"), ("Dr. Smith", "dr. smith"), ("5!", "5!"), ("yes", "**Yes**"), ("(0,1)", "(0, 1)"),
    ("12", "\\boxed{12}."), ("$12$。", "12"), ("1/3", "33.3333%"), ("x≠5", "x\\neq 5"),
    ("x≥5", "5 \\leq x"), ("4", "`4`"), ("x^2", "x**2"), ("x\\neq 5", "x ≠ 5"),
    ("café", "cafe\u0301"), ("K", "K"), ("(0,\\infty)", "(0, +\\infty)"), ("y=2x+1", "y-2x=1"),
]  # fmt: skip
DIFFERENT = [
    ("on", "no"), ("dog", "god"), ("ab", "ba"), ("blue", "b l u e"), ("5", "6 or 5"), ("12", "12 apples"),
    ("5", "5, 6"),
    ("5", "6, 5"), ("5", "5%"), ("50%", "50"), ("12 cm", "12 m"), ("3 dogs", "3 cats"), ("2", "2i"),
    ("2", "2x"), ("2", "2 x"), ("2", "2pi"), ("5", "5!"), ("5", "5 million"), ("5", "five"), ("5", "-5"),
    ("5", "6=5"), ("5", "x=6=5"), ("x=5", "y=5"), ("3:4", "3:5"), ("x", "|x|"), ("1998-05", "1999-06"),
    ("2020-01-02", "2020-02-01"), ("1/2/2020", "2/1/2020"), ("3-5", "4-6"), ("1.2.3", "1.2.4"),
    ("1 1/2", "11/2"), ("12", "1 2"), ("12", "1,2"), ("1.2", "1,2"), ("1,2", "2,1"), ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2]"), ("1.23456789", "1.23456788"), ("0.0000001", "0"), ("1/3", "0.333"),
    ("1/10000000", "0.000000"), ("x^2", "x2"), ("x²", "x2"), ("H-O-H", "H-H-O"), ("A-B", "B-A"),
    ("1/0", "2/0"), ("$5", "€5"), ("room 12", "hall 12"), ("5", ""), ("?", "!"), ("x", "y"), ("5=6", "7=8"),
    ("5<6", "7<8"), ("\\infty", "-\\infty"), ("0", "5-\\sqrt{\\infty}"), ("(0,\\infty)", "[0,\\infty)"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_same_answers(gold, answer):
    assert reward(answer, gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers(gold, answer):
    assert reward(answer, gold) == 0.0
    if answer:
        assert reward(gold, answer) == 0.0


def test_integer_without_choices_is_an_open_answer():
    assert accuracy_reward(["Answer: 2", "<answer>C</answer>"], [2, 2]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 12", "Answer: **12**", "答案：12", "答案是12。因为有12个。", "The answer is 12.",
        "The answer is 12. It was counted.",
        "So \\boxed{12}", "\\boxed{\\text{12}}", "Answer: 11\nAnswer: 12",
        "<think>Answer: 11</think> Answer: 12", "Answer: $12$",
        "11</think><answer>12</answer>",
    ],
)  # fmt: skip
def test_explicit_statement_of_an_open_answer(text):
    assert accuracy_reward([text] * 2, ["12", "11"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "12", "(12)", "<think>\\boxed{12}", "<answer>12", "Answer: 12 or 13", "\\boxed{12", "Answer:",
        "The answer is 12. Or 13.", "The answer is 12; 13.", "The answer is 12. 13 is possible.",
        "The answer is 12 or 13",
        "答案是12。或13。", "答案是12。也可能是13。", "\\boxed{12} or \\boxed{13}", "\\boxed{13}, \\boxed{12}",
        "\\boxed{12, 13}",
        "Answer: 12. Or 13.", "Answer: 12; 13", "答案：12、13", "Wrong answer: 12",
        "<answer>12</answer><answer>13</answer>",
    ],
)  # fmt: skip
def test_no_number_or_two_in_the_statement_of_an_open_answer(text):
    assert accuracy_reward([text], ["12"]) == [0.0]


LETTER_B = [
    "B",
    "b",
    "Ｂ",
    "(B)",
    "（B）",
    "B.",
    "B)",
    "B:",
    "B) blue",
    "b) blue",
    "(B) blue dog",
    "**B**",
    "<answer>B</answer>",
]
STATES_B = [
    "<answer>(B)</answer>", "Answer: B.", "It is (B)", "<answer>b</answer>", "<answer>B) blue</answer>", "选项 B",
    "<answer>(B) blue</answer>", "Answer: B) blue", "Answer: B. blue", "the answer is B, blue", "\\boxed{B}",
]  # fmt: skip
NOT_B = [
    "<answer>C</answer>", "(B) or (C)", "<answer>A) blue</answer>", "<answer>B) blue or C) red</answer>",
    "Answer: B or C",
    "<answer>B, C</answer>", "<answer>blue</answer>", "<answer>1</answer>", "<answer>B or C</answer>", "Answer: not B",
    "<answer></answer>", "<answer>B blue</answer>", "<answer>B) blue\nC) red</answer>", "<answer>Bee</answer>", "B",
]  # fmt: skip


@pytest.mark.parametrize("solution", LETTER_B)
def test_letter_without_choices_is_compared_with_the_stated_letter(solution):
    assert accuracy_reward(STATES_B, [solution] * len(STATES_B)) == [1.0] * len(STATES_B)
    assert accuracy_reward(NOT_B, [solution] * len(NOT_B)) == [0.0] * len(NOT_B)


@pytest.mark.parametrize("label", [1, 1.0, np.int64(1), "B", "(B)"])
def test_label_without_choices_is_compared_with_the_stated_letter(label):
    rewards = accuracy_reward([*STATES_B, *NOT_B], label_idx=[label] * (len(STATES_B) + len(NOT_B)))
    assert rewards == [1.0] * len(STATES_B) + [0.0] * len(NOT_B)


def test_label_as_text_without_choices_stays_a_text():
    assert accuracy_reward(["<answer>1</answer>", "<answer>B</answer>"], label_idx=["1", "1"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "name", ["E. coli", "A. Lincoln", "B-52", "A+", "A-", "C#", "D minor", "I am", "a cat", "A) red B) blue"]
)
def test_open_answer_that_starts_with_a_letter_is_no_letter(name):
    assert reward(name, name) == 1.0
    assert reward(name[0], name) == 0.0


@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9**9", "9^{9^{9^9}}", "9^9^9^9", "((9^{99})^{99})^{99}", "99999999999^{99999999}",
        "(a+b+c+d+f)^{999}",
        "9!!!!!!", "\\binom{99999999}{9999999}", "(" * 199, "\\frac" * 30, "{" * 50 + "}" * 50, "10^{-9999999}",
        "1e999999999", "9" * 199, "\\sqrt{" * 30, "x" + "_1" * 90, "__import__('os').system('true')",
    ],
)  # fmt: skip
def test_formula_that_would_take_forever_is_only_compared_as_text(bomb, caplog, capfd):
    def compare():
        answers = [f"<answer>{text}</answer>" for text in (bomb, "2^{10}", bomb)]
        rewards.extend(accuracy_reward(answers, ["2^{10}", bomb, bomb]))

    rewards: list[float] = []
    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join(timeout=900)
    assert rewards == [0.0, 0.0, 1.0]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_slow_formula_in_another_thread_is_given_up(monkeypatch):
    monkeypatch.setattr(formulas, "_SECONDS", 0.2)
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(reward("\\sin(\\sin((0.5-i)^{13}))", "10+0")), daemon=True)
    thread.start()
    thread.join(timeout=900)
    assert rewards == [0.0]
    assert sys.getprofile() is None


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_a_machine_that_does_much_else_changes_no_reward(in_main_thread, monkeypatch):
    """Comparing takes longer than the limit, but computes for less."""

    def slowly(*args, **kwargs):
        time.sleep(2)
        return compared(*args, **kwargs)

    compared = grader.sympy_expr_eq
    monkeypatch.setattr(grader, "sympy_expr_eq", slowly)
    monkeypatch.setattr(formulas, "_SECONDS", 1)
    formulas.same_formula.cache_clear()
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(formulas.same_formula("y^{2}+z", "z+y^{2}")))
    (thread.run if in_main_thread else thread.start)()
    if not in_main_thread:
        thread.join()
    assert rewards == [True]


def test_a_limit_of_computing_time_leaves_other_timers_alone():
    formulas.same_formula.cache_clear()
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert formulas.same_formula("y^{3}+z", "z+y^{3}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_other_threads_get_the_same_rewards_without_warnings(caplog):
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(accuracy_reward(["\\boxed{y+3}"] * 2, ["3+y", "y+4"])))
    thread.start()
    thread.join()
    assert rewards == [[1.0, 0.0]]
    assert not caplog.records


ADVERSARIAL = [
    "<think>", "</think>", "<answer>", "<answer><think>", "answer", "answer ", "the final ", "the ", "答案",
    "选", "选 ", "选(", "\\boxed{",
    "(", "( ", "(A", "(A)", "!", "B or ", "B ", ".", "*", "$", " ", "\n", "\\text{", "\ud800", "1,000", "9^",
    "a=", "},{",
]  # fmt: skip


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_a_million_characters_take_linear_time(piece):
    long = piece * (1_000_000 // len(piece))
    texts = [long, f"the answer is B{long}x", f"<answer>B{long}x</answer>", f"<answer>{long}x</answer>"]
    start = time.process_time()
    accuracy_reward(texts, ["B", "B", "B", "2^{10}"], [["cat", "dog"]] * 3 + [None])
    assert time.process_time() - start < 15


@settings(max_examples=200)
@given(st.decimals(-(10**6), 10**6, places=3), st.decimals(-(10**6), 10**6, places=3))
def test_two_different_numbers_are_never_both_right(first, second):
    assert reward(str(second), str(first)) == float(first == second)


@settings(max_examples=200)
@given(st.text("klno 12-/.,:xy", min_size=1, max_size=6), st.text("klno 12-/.,:xy", min_size=1, max_size=6))
def test_equality_of_short_texts_is_symmetric(first, second):
    """Of open answers: a letter up to J that is right is an option's, stated with a full stop or colon at most."""
    if first.strip() and second.strip():
        assert reward(first, second) == reward(second, first)


@settings(max_examples=100)
@given(st.from_regex(r"[a-z]{2,8}( [a-z]{2,8})?", fullmatch=True), st.from_regex(r"[a-z]{2,8}", fullmatch=True))
def test_two_different_words_are_never_both_right(first, second):
    assert reward(first, first) == 1.0
    assert reward(second, first) == float(first == second)
