"""Drawn questions: the same for a seed, apart between splits, and without a hint in letter or order."""

from collections import Counter

import pytest

from vgr_trl.data.prompts import LETTERS
from vgr_trl.demo.demo import FAMILIES, as_open_question, draw_questions
from vgr_trl.evaluation import blank_image


def test_a_seed_draws_the_same_questions_again():
    first, second = (draw_questions(20, seed=3, split="train") for _ in range(2))
    assert first == second
    assert first != draw_questions(20, seed=4, split="train")


@pytest.mark.parametrize("seed", [0, 1])
def test_no_image_occurs_in_two_splits(seed):
    images = [
        {row["image"].tobytes() for row in draw_questions(400, seed=seed, split=split)}
        for split in ("train", "validation", "test")
    ]
    assert not images[0] & images[1]
    assert not images[0] & images[2]
    assert not images[1] & images[2]


def test_solution_is_in_the_thought_and_its_letter_says_nothing_about_it():
    rows = draw_questions(2000, seed=0, split="train")
    pairs = Counter()
    for row in rows:
        word = row["choices"][LETTERS.index(row["solution"])]
        assert word in row["thought"].split()
        assert sorted(row["choices"]) == sorted(FAMILIES[row["family"]][1])
        pairs[word, row["solution"]] += 1
    assert len(pairs) == 12 * 4
    # 2000 rows over 48 pairs: 42 on average; five standard deviations of a Poisson count are 32.
    assert all(10 < count < 74 for count in pairs.values())


def test_an_open_question_has_the_word_as_solution():
    row = draw_questions(1, seed=0, split="test")[0]
    opened = as_open_question(row)
    assert "choices" not in opened
    assert opened["solution"] == row["choices"][LETTERS.index(row["solution"])]
    assert opened == draw_questions(1, seed=0, split="test", multiple_choice=False)[0]


def test_a_blanked_image_shows_nothing():
    image = blank_image(draw_questions(1, seed=0, split="test")[0]["image"])
    assert image.size == (56, 56)
    assert len(image.getcolors()) == 1
