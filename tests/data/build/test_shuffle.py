from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import shuffle_choices, stays_in_order

COLOURS = ["red", "blue", "green", "teal"]


def question(choices=tuple(COLOURS), solution="A", problem="Which colour?") -> Question:
    return Question("q", "made", problem, solution, ["image"], list(choices) if choices else None)


def shuffled(questions, seed=0):
    return [found for _, found in shuffle_choices(((Origin("f", 0), item) for item in questions), seed)]


def test_right_letters_come_equally_often():
    found = shuffled([question()] * 100 + [question(COLOURS[:3])] * 30)
    assert Counter(item.solution for item in found[:100]) == dict.fromkeys("ABCD", 25)
    assert Counter(item.solution for item in found[100:]) == dict.fromkeys("ABC", 10)
    places = Counter(item.choices.index("blue") for item in found[:100])
    assert all(10 <= places[place] <= 45 for place in range(4))  # wrong options move too


@given(count=st.integers(2, 10), right=st.integers(0, 9), seed=st.integers(0, 3))
def test_the_right_option_stays_right_and_none_is_lost(count, right, seed):
    choices = [f"option-{number}" for number in range(count)]
    before = question(choices, "ABCDEFGHIJ"[right % count])
    (after,) = shuffled([before], seed)
    assert after.choices["ABCDEFGHIJ".index(after.solution)] == choices[right % count]
    assert sorted(after.choices) == sorted(choices)
    assert (after.id, after.problem, after.images) == (before.id, before.problem, before.images)


def test_the_order_depends_on_the_seed_alone():
    many = [question()] * 20
    assert shuffled(many) == shuffled(many)
    assert shuffled(many) != shuffled(many, seed=1)


def test_reasons_and_open_questions_pass():
    both = [(Origin("f", 0), "it is bad"), (Origin("f", 1), question(None, "red"))]
    assert list(shuffle_choices(both, 0)) == both


@pytest.mark.parametrize(
    ("problem", "last"),
    [
        ("Which?", "None of the above"),
        ("Which?", "All of the following"),
        ("Which?", "Both A and B"),
        ("Which?", "A, B"),
        ("Which?", "(A) or (C)"),
        ("Which?", "only B"),
        ("Which?", "B"),
        ("Is option B larger than option C?", "teal"),
    ],
)
def test_options_that_name_others_stay(problem, last):
    asked = question([*COLOURS[:3], last], "B", problem)
    assert stays_in_order(asked)
    assert shuffled([asked]) == [asked]


@pytest.mark.parametrize("last", ["Vitamin A", "a and b", "Plan B is better", "teal"])
def test_other_options_do_not(last):
    assert not stays_in_order(question([*COLOURS[:3], last]))
