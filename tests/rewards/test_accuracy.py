"""Which answer a completion states, by hand from `Stated answer` in definitions.md."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vgr_trl.errors import RewardError
from vgr_trl.rewards import accuracy_reward

CHOICES = ["red", "green", "blue dog", "a big dog"]
MIXED = ["3", "3.5", "Reduce A and B", "\\frac{120}{17}", "0.33%"]
BY_HAND = tomllib.loads(Path(__file__).with_name("by_hand.toml").read_text("utf-8"))
OPEN, CLAIMS = BY_HAND["without_choices"], BY_HAND["claims"]


def stated(text, choices=CHOICES):
    """The letters for which `text` is right."""
    rewards = accuracy_reward([text] * len(choices), list(range(len(choices))), [choices] * len(choices))
    return "".join(letter for letter, reward in zip("ABCDEFGHIJ", rewards, strict=False) if reward)


@pytest.mark.parametrize("kind", BY_HAND["states"])
def test_states_one_option_or_none(kind):
    texts = BY_HAND["states"][kind]
    assert [[text, stated(text)] for text, _ in texts] == texts


def test_letters_count_before_texts():
    choices = ["B", "A", "x"]
    assert accuracy_reward(["<answer>B</answer>"] * 2, [0, 1], [choices] * 2) == [0.0, 1.0]
    assert accuracy_reward(["<answer>F</answer>"], ["F"], [["F", "G", "H"]]) == [1.0]  # letters A, B, C: F is a text
    assert accuracy_reward(["<answer>cat</answer>"], [0], [["cat", "Cat.", "dog"]]) == [0.0]  # two of that text


@pytest.mark.parametrize("letter", BY_HAND["states_of_mixed"])
def test_letters_with_their_own_text_and_options_as_whole_answers(letter):
    texts = BY_HAND["states_of_mixed"][letter]
    assert [(text, stated(text, MIXED)) for text in texts] == [(text, letter) for text in texts]


@pytest.mark.parametrize("column", ["solution", "label_idx"])
@pytest.mark.parametrize("right", ["B", "B) blue", "<answer>B</answer>"])
def test_a_letter_without_choices_is_compared_with_the_stated_letter(column, right):
    of_b, others = OPEN["B"], OPEN["not_B"]
    texts, expected = of_b + others, [1.0] * len(of_b) + [0.0] * len(others)
    assert accuracy_reward(texts, **{column: [right] * len(texts)}) == expected
    assert accuracy_reward(["<answer>1</answer>", "<answer>B</answer>"], [1, 1]) == [1.0, 0.0]


def test_label_idx_stands_in_for_solution():
    completions = ["<answer>B</answer>"] * 3
    assert accuracy_reward(completions, choices=[CHOICES] * 3, label_idx=[1, "B", 0]) == [1.0, 1.0, 0.0]
    assert accuracy_reward(completions, [None, "B", None], [CHOICES] * 3, label_idx=[1, 0, None]) == [1.0, 1.0, None]
    assert accuracy_reward(completions) == [None] * 3


def test_statement_of_an_open_answer():
    right, wrong = OPEN["twelve"], OPEN["not_twelve"]
    assert [accuracy_reward([text] * 2, ["12", "11"]) for text in right] == [[1.0, 0.0]] * len(right)
    assert accuracy_reward(wrong, ["12"] * len(wrong)) == [0.0] * len(wrong)


@pytest.mark.parametrize("frame", [r"\boxed{%s}", "<answer>%s</answer>", "#### %s", "The answer is %s.", "Answer: %s"])
def test_a_minus_before_a_space_is_a_sign_and_before_a_letter_or_word_a_bullet(frame):
    signed, choices = [frame % "- 7"] * 2, ["-7", "7"]
    assert accuracy_reward(signed, choices) == accuracy_reward(signed, [0, 1], [choices] * 2) == [1.0, 0.0]
    assert [stated(frame % f"- {text}") for text in ("B", "(B)", "B. green", "**B**", "green")] == ["B"] * 5
    assert accuracy_reward([f"B. {frame % 'B. - 7'}"], ["B"], [["7", "-7"]]) == [1.0]


def test_what_is_withdrawn_supposed_or_joined_states_nothing():
    texts = CLAIMS["none"]
    found = zip(texts, accuracy_reward(texts, ["7"] * len(texts)), strict=True)
    assert [text for text, reward in found if reward] == []
    factors = ["16 $\\pi$", "The answer is 16 $\\pi$."]
    assert [accuracy_reward(factors, [gold] * 2) for gold in ("\\pi", "16\\pi")] == [[0, 0], [1, 1]]


def test_a_denial_agrees_with_the_option_no():
    texts = ["No, it is not.", "No, it isn't.", "Yes, it is.", "Yes, it is unclear.", "Yes. No, that is wrong."]
    found = [accuracy_reward(texts, [right] * 5, [["yes", "no"]] * 5) for right in ("A", "B")]
    assert found == [[0, 0, 1, 0, 0], [1, 1, 0, 0, 0]]


def test_a_text_has_one_value():
    for kind, most in (("at_most_one", 1), ("of_none", 0)):
        found = [(text, sum(map(int, accuracy_reward([text] * len(golds), golds)))) for text, golds in CLAIMS[kind]]
        assert {text: count for text, count in found if count > most} == {}


UNEQUAL = "red|blue|a cat|3|20|0.25|3:1|yes|no|x + 1|2\\sqrt{3}|\\frac{\\pi}{3}|红色|猫".split("|")
WORDS = (
    "The answer is|Answer:|I choose|####|there are|it|on|in|at|of|with|and|or|not|because|so|than|more|has|twice|maybe|"
    "A|B|(C)|D.|two|十二|是|否|答案是|有|在|或|和|,|。|.|:|;|-|/|=|\n|\n- |\n1. |**|$|<answer>|</answer>|<think>|"
    "</think>|\\boxed{|}|(|)|1. |2) |- |= |$x$ = |3 + |2\\sqrt{3} =|If A,|; else|Suppose|如果|as|next to|blue|?"
).split("|")
TEXTS = st.builds(
    lambda pairs, joint: joint.join(word for words, answer in pairs for word in (*words, answer)),
    st.lists(st.tuples(st.lists(st.sampled_from(WORDS), max_size=2), st.sampled_from(UNEQUAL)), min_size=2, max_size=4),
    st.sampled_from((" ", "")),
)
JOINTS = (" or ", " and ", ", ", " / ", "; ", "\n", " | ", "或", "、", " ", " on ", "; else ")
FRAMES = ("{}", "The answer is {}.", "<answer>{}</answer>", r"\boxed{{{}}}", "答案是{}。", "**{}**")
ITEMS = ("{0}", "({0})", "{1}", "({0}) {1}", "{0}. {1}", "- {0}: {1}")


@settings(derandomize=True, max_examples=400)
@given(text=TEXTS)
def test_a_text_is_right_for_at_most_one_of_unequal_references(text):
    assert sum(accuracy_reward([text] * len(UNEQUAL), UNEQUAL)) <= 1
    choices = UNEQUAL[:4]
    assert sum(accuracy_reward([text] * 4, [0, 1, 2, 3], [choices] * 4)) <= 1


@settings(derandomize=True, max_examples=200)
@given(
    order=st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=True),
    choices=st.lists(st.sampled_from(UNEQUAL), min_size=4, max_size=4, unique=True),
    item=st.sampled_from(ITEMS),
    joint=st.sampled_from(JOINTS),
    frame=st.sampled_from(FRAMES),
)
def test_two_options_are_none(order, choices, item, joint, frame):
    assume(joint != "\n" or not frame.endswith((".", "。")))  # a statement ends with its line
    words = [item.format("ABCD"[index], choices[index]) for index in order]
    text = frame.format(joint.join(words))
    assume(joint not in (" ", " on ") or "".join(words).isalpha())  # 3 x + 1 is a formula
    assert accuracy_reward([text] * 4, [0, 1, 2, 3], [choices] * 4) == [0] * 4


ROOMS = ["kitchen", "bathroom", "bedroom", "living room"]
EXPLAINED = tomllib.loads(Path(__file__).with_name("explained.toml").read_text("utf-8"))
EXPLANATIONS = st.lists(st.sampled_from(EXPLAINED["explanations"]), min_size=1, max_size=3, unique=True)


@settings(derandomize=True, max_examples=300)
@given(
    statement=st.sampled_from(EXPLAINED["statements"]),
    explanations=EXPLANATIONS,
    joint=st.sampled_from(("\n\n", "\n", "\nExplanation: ")),
)
def test_an_explanation_behind_a_statement_gives_its_option_to_no_other(statement, explanations, joint):
    rewards = accuracy_reward([statement + joint + " ".join(explanations)] * 4, list("ABCD"), [ROOMS] * 4)
    assert rewards == [0, 0, 1, 0]


def test_a_capital_letter_of_another_alphabet_is_no_option():
    assert accuracy_reward(["İ)", "İ) cat", "Answer: İ"], ["A"] * 3, [CHOICES] * 3) == [0] * 3


def test_called_as_trl_calls_it():
    parts = [{"type": "text", "text": "<answer>"}, {"type": "text", "text": "A</answer>"}, {"type": "image"}]
    completions = [
        [{"role": "assistant", "content": "<answer>B</answer>"}],
        [{"role": "assistant", "content": parts}],
        [{"role": "assistant", "content": None}, {"role": "tool", "content": "<answer>B</answer>"}],
        [{"role": "tool", "content": "Answer: A"}, {"role": "assistant", "content": "Answer: 4"}],
    ]
    columns = {"solution": ["B", "B", "B", "4"], "choices": [CHOICES, CHOICES, CHOICES, None], "log_metric": print}
    assert accuracy_reward(prompts=["?"] * 4, completions=completions, **columns) == [1.0, 0.0, 0.0, 1.0]


def test_columns_that_do_not_fit():
    for completions, solution, message in ((["a", "b"], ["A"], "solution"), ([None], ["A"], "NoneType")):
        with pytest.raises(RewardError, match=message):
            accuracy_reward(completions, solution)


@pytest.mark.parametrize(
    "piece", ["<think>", "<answer>", "answer ", "the final ", "选 ", "\\boxed{", "( ", "(A)", "B or ", "*", " ", "9^"]
)
def test_long_texts_are_read_in_linear_time(piece):
    """A pattern that backtracks would take hours for a million characters."""
    long = piece * (1_000_000 // len(piece))
    texts = [long, f"the answer is B{long}x", f"<answer>B{long}x</answer>", f"<answer>{long}x</answer>"]
    assert len(accuracy_reward(texts, ["B", "B", "B", "2^{10}"], [["cat", "dog"]] * 3 + [None])) == 4
