"""Which answer a completion states, by hand from `Stated answer` in definitions.md."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vgr_trl.errors import RewardError
from vgr_trl.rewards import accuracy_reward

CHOICES = ["red", "green", "blue dog", "a big dog"]


def stated(text, choices=CHOICES):
    """The letters for which `text` is right."""
    rewards = accuracy_reward([text] * len(choices), list(range(len(choices))), [choices] * len(choices))
    return "".join(letter for letter, reward in zip("ABCDEFGHIJ", rewards, strict=False) if reward)


ONE = {
    "in the tag": [
        ("<answer> ｂ。 </answer>", "B"), ("<answer>（Ｂ）</answer>", "B"), ("<answer>$\\boxed{B}$</answer>", "B"),
        ("<Answer>**B**：</Answer>", "B"), ("<answer>A BIG\nDOG.</answer>", "D"),
    ],
    "the last tag": [
        ("<answer>A</answer> no: <answer>B</answer>", "B"), ("<answer><answer>B</answer></answer>", "B"),
        ("<answer>B</answer> Answer: A", "B"), ("<answer>B", "B"),
    ],
    "never a thought": [("<think>Answer: A</think><answer>B</answer>", "B"), ("Answer: A</think>Answer: B", "B")],
    "a label": [
        ("The image shows (A) and (C). Answer: B", "B"), ("**Answer**: B", "B"), ("Final Answer: C. blue dog", "C"),
        ("Answer: A. Wait.\nAnswer: B", "B"), ("Answer: A (red)", "A"), ("Wrong answer: A\nAnswer: B", "B"),
        ("答案：Ｂ", "B"),
    ],
    "a sentence": [
        ("So the final answer is (B).", "B"), ("The correct answer is option B.", "B"), ("the answer is: b.", "B"),
        ("The answer is \\(B\\).", "B"), ("Answer: B, since x = 2", "B"), ("正确答案是B。因为是草。", "B"),
    ],
    "an option by its word": [("选项B，绿色", "B"), ("应选（B）", "B"), ("不选A，选B", "B")],
    "a box": [("So \\boxed{\\text{B}}. Not A.", "B"), ("not \\boxed{A}. So \\boxed{B}", "B")],
    "an option by its word, and a verb": [("正确选项为B", "B"), ("正确选项是：Ｂ。因为是草。", "B")],
    "nothing but a line": [
        ("B", "B"), ("It is (A) or (C).\n\n**B**.\n", "B"), ("<think>A</think>Ｂ", "B"), ("B. green", "B"),
        ("A dog barks.\nOption B", "B"), ("Choice: B.", "B"), ("choice is **B**", "B"), ("(B) or (C)\nOption (B)", "B"),
        ("B\nbecause it is green", "B"),
    ],
    "a statement before a line": [("Answer: A\nThat was easy.\nB", "A"), ("选项A\n看图。\nB", "A")],
    "a sentence of its own": [
        ("It must be (B), as (b) grows.", "B"), ("Look: the animal is a blue dog.", "C"), ("green", "B"),
        ("The answer is A. B is possible.", "A"), ("b", "B"),
    ],
    "not another": [
        ("答案是B。A是红色的，所以不对。", "B"),
        ("The answer is B, not A.", "B"), ("(A) is incorrect. The right one is green.", "B"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ONE)
def test_states_one_option(kind):
    assert [(text, stated(text)) for text, _ in ONE[kind]] == ONE[kind]


NONE = {
    "nothing": ["", "Answer:", "<answer> \n </answer>", "\\boxed{}", "<answer>\u200b</answer>"],
    "a line of prose": [
        "A dog", "I see a dog\nA dog barks", "As shown in panel (b), it barks.", "Eliminate (B).", "(B)不对",
        "Option B is wrong", "Not B", "B or C", "Optional B", "B\nC", "Option B. Option C.",
        "E", "Options B", "不是选项B", "正确选项不为B",
    ],
    "not closed": ["\\boxed{B", "<think>Answer: B", "</answer>B<answer>"],
    "a thought": ["<think><answer>B</answer></think>", "Answer: B</think>"],
    "an empty tag counts before a label": ["<answer></answer> Answer: B"],
    "no option's letter": ["<answer>E</answer>", "(E)", "Answer: 1", "Answer: А"],
    "two letters": [
        "Answer: A; B", "Answer: A. Or B.", "Answer: A-D", "Answer: A (B)", "Answer: A\n- B", "选A或B",
        "\\boxed{A} or \\boxed{B}", "<answer>(A)(B)</answer>", "(A) or (B)",
    ],
    "a letter and another text": ["Answer: A, green", "<answer>red or green</answer>"],
    "a refusal": ["The answer is not A", "答案不是A", "不能选A", "It can't be (A)", "Answer: A is wrong"],
    "a word": ["Answer: a big cat", "Answer: I think", "Answer: A+", "答案是A型血", "f(B) is a function"],
}  # fmt: skip


@pytest.mark.parametrize("kind", NONE)
def test_states_no_single_option(kind):
    assert [(text, stated(text)) for text in NONE[kind]] == [(text, "") for text in NONE[kind]]


def test_letters_count_before_texts():
    choices = ["B", "A", "x"]
    assert accuracy_reward(["<answer>B</answer>"] * 2, [0, 1], [choices] * 2) == [0.0, 1.0]
    assert accuracy_reward(["<answer>F</answer>"], ["F"], [["F", "G", "H"]]) == [1.0]  # letters A, B, C: F is a text
    assert accuracy_reward(["<answer>cat</answer>"], [0], [["cat", "Cat.", "dog"]]) == [0.0]  # two of that text


MIXED = ["3", "3.5", "Reduce A and B", "\\frac{120}{17}", "0.33%"]
OF_MIXED = {
    "A": ["3", "There are 3 dogs.", "\\boxed{3}", "The answer is (A) 3."],
    "B": ["(B) 3.5", "**B. 3.5**", "\\boxed{3.5}", "The total is 2 + 1.5 = 3.5."],
    "C": ["C. Reduce A and B", "The answer is **C. Reduce A and B**.", "<answer>Reduce A and B</answer>"],
    "D": ["120/17", "$\\frac{120}{17}$", "so x = $120/17$"],
    "": [
        "E. 3.5", "(E) 3", "\\boxed{\\frac{3}{4}}", "\\boxed{2\\sqrt{3}}", "-3", "3:1", "10:3",
        "\\boxed{2(3)}", "x = -3",
        "B. 5", "\\boxed{(B) 3.4}", "(E) 0.3%", "The answer is (D) $\\frac{1}{17}$", "3 as well as 3.5",
        "\\boxed{A->B->C}",
        "A Circular Sign", "The correct option letter is N/A.", "The answer is (A)? Is it?", "If A, 3; else 3.5",
        "If I had to describe option B, it is 3.5.", "The answer would be B if the lamp were on.",
        "(A) 3\n(B) 3.5\n(C) Reduce A and B", "A) 3; B) 3.5; C) Reduce A and B", "3\n3.5\n0.33%",
        "more than 3", "twice 3",
        "It cannot be 3.", "It is unclear if the answer is 3.", "I'd say so",
        "none of the options A, B, C, D is correct", "3 3.5 0.33%", "If A, Reduce A and B; else 3", "3?",
        "答案是If the answer is 3, we are done.", "Reduce A and B on 3", "I'd say A; someone else would say B",
    ],
}  # fmt: skip


@pytest.mark.parametrize("letter", OF_MIXED)
def test_letters_with_their_own_text_and_options_as_whole_answers(letter):
    texts = OF_MIXED[letter]
    assert [(text, stated(text, MIXED)) for text in texts] == [(text, letter) for text in texts]


LETTERS_OF_LANGUAGES = [
    "La respuesta correcta es la B.", "Die richtige Antwort ist B.", "La bonne réponse est B.", "正解はBです。",
    "所以选项(B)正确。",
    "option letter is B", "<CONCLUSION>B</CONCLUSION>", "◁think▷A?◁/think▷B", "B</s>",
    '{"final_answer": "B", "why": "grass"}',
    "The answer is B.\n\nI hope this helps! Let me know if you have other questions.",
]  # fmt: skip


def test_letters_in_other_languages_and_wrappings():
    assert [(text, stated(text)) for text in LETTERS_OF_LANGUAGES] == [(text, "B") for text in LETTERS_OF_LANGUAGES]


STATES_B = [
    "B", "Option B", "<answer>(B)</answer>", "Answer: B.", "It is (B)", "<answer>B) blue</answer>", "选项 B",
    "\\boxed{B}",
]  # fmt: skip
NOT_B = [
    "<answer>C</answer>", "(B) or (C)", "<answer>B) blue or C) red</answer>", "Answer: B or C", "<answer>blue</answer>",
    "<answer>1</answer>", "Answer: not B", "I ruled out (B).",
]  # fmt: skip


@pytest.mark.parametrize("column", ["solution", "label_idx"])
@pytest.mark.parametrize("right", ["B", "B) blue", "<answer>B</answer>"])
def test_a_letter_without_choices_is_compared_with_the_stated_letter(column, right):
    texts = [*STATES_B, *NOT_B]
    expected = [1.0] * len(STATES_B) + [0.0] * len(NOT_B)
    assert accuracy_reward(texts, **{column: [right] * len(texts)}) == expected
    assert accuracy_reward(["<answer>1</answer>", "<answer>B</answer>"], [1, 1]) == [1.0, 0.0]


def test_label_idx_stands_in_for_solution():
    completions = ["<answer>B</answer>"] * 3
    assert accuracy_reward(completions, choices=[CHOICES] * 3, label_idx=[1, "B", 0]) == [1.0, 1.0, 0.0]
    assert accuracy_reward(completions, [None, "B", None], [CHOICES] * 3, label_idx=[1, 0, None]) == [1.0, 1.0, None]
    assert accuracy_reward(completions) == [None] * 3


OPEN = [
    "Answer: **12**", "答案是12。因为有12个。", "The answer is 12. It was counted.", "\\boxed{\\text{12}}",
    "Answer: 11\nAnswer: 12", "11</think><answer>12</answer>", "<answer>12", "<answer>There are 12.</answer>", "12",
    "We count.\n\nThere are **12** dogs.", "24 divided by 2 is 12.", "10 plus 2 equals 12.", "3 * 4 is 12.",
]  # fmt: skip
NOT_OPEN = [
    "<answer>11 or 12</answer>", "<answer>It is not 12.</answer>",
    "-12", "Answer: -12", "10, 11, 12", "They are 10, 11, 12.", "negative 12",
    "The answer is 13, not 12", "between 11 and 12",
    "<think>\\boxed{12}", "Answer: 12 or 13", "The answer is 12. Or 13.",
    "答案是12。也可能是13。", "\\boxed{12} or \\boxed{13}", "Wrong answer: 12", "<answer>13</answer>",
    "10 plus 2 is 12 or 13.", "10 plus 2 is not 12.", "12 plus 2 is 14.", "3/4 is 12", "12 of 24 are 12",
    "The sign is in the building called 12, which is located in a room called 9.",
]  # fmt: skip


def test_statement_of_an_open_answer():
    assert [accuracy_reward([text] * 2, ["12", "11"]) for text in OPEN] == [[1.0, 0.0]] * len(OPEN)
    assert accuracy_reward(NOT_OPEN, ["12"] * len(NOT_OPEN)) == [0.0] * len(NOT_OPEN)


MANY = [
    ("12. yes", ["12", "yes"]), ("$2\\sqrt{3}$ = five", ["5", "2\\sqrt{3}"]), ("四是的。", ["四是", "的"]),
    ("-  -6", ["6", "-6"]), ("* \\(2\\), 一共12", ["2", "12"]), ("**Answer** $white$", ["white", "Answer"]),
    ("red on blue on green on yellow on black", ["red", "blue", "green", "yellow", "black"]),
    ("There are two in three on four at five", ["2", "3", "4", "5"]),
    ("The age gap between the two people in the image is 10 years.", ["10", "2"]),
    ("It is red, or it may be blue.", ["red", "blue"]), ("Yes\nNo", ["yes", "no"]), ("3\n4\n5", ["3", "4", "5"]),
    ("\\boxed{3} and \\boxed{4}", ["3", "4"]), ("from 3 to 5", ["3", "5"]), ("10:45", ["10", "45", "10:45"]),
    ("> 7", ["7"]), ("There is no cat.", ["cat"]), ("The answer cannot be 12.", ["12"]),
    ('{"min": 3, "max": 5}', ["3", "5"]),
    ("Please provide the ages of the two people", ["2"]), ("R1 is larger than the region R2", ["R2"]),
]  # fmt: skip

NO_CLAIM = [
    "I doubt that it is 7.", "It is false that the answer is 7.", "I refuse to say it is 7.", "It used to be 7.",
    "In case it is 7", "Suppose x = 7.", "Assume the answer is 7.", "If the car were red, the answer would be 7.",
    "我怀疑答案是7", "a third of 7", "red on 5 by 7?", "from two to 七", "三和7", "<answer>red\n7</answer>",
    "The answer is 3 or the answer is 7.", "The answer is red and also 7.", "7 alias four",
]  # fmt: skip


def test_what_is_withdrawn_supposed_or_joined_states_nothing():
    found = zip(NO_CLAIM, accuracy_reward(NO_CLAIM, ["7"] * len(NO_CLAIM)), strict=True)
    assert [text for text, reward in found if reward] == []
    phrases = ["red on blue", "red in blue", "the dog on the blue", "wood on stone on blue"]
    assert accuracy_reward(phrases, ["blue"] * 4) == [0] * 4
    factors = ["16 $\\pi$", "The answer is 16 $\\pi$."]
    assert [accuracy_reward(factors, [gold] * 2) for gold in ("\\pi", "16\\pi")] == [[0, 0], [1, 1]]


def test_a_denial_agrees_with_the_option_no():
    texts = ["No, it is not.", "No, it isn't.", "Yes, it is.", "Yes, it is unclear.", "Yes. No, that is wrong."]
    found = [accuracy_reward(texts, [right] * 5, [["yes", "no"]] * 5) for right in ("A", "B")]
    assert found == [[0, 0, 1, 0, 0], [1, 1, 0, 0, 0]]


def test_a_text_has_one_value():
    found = [(text, sum(map(int, accuracy_reward([text] * len(golds), golds)))) for text, golds in MANY]
    assert {text: count for text, count in found if count > 1} == {}
    assert [count for _, count in found[-6:]] == [0] * 6


def test_a_list_of_numbers_is_one_answer():
    texts = ["<answer>14</answer>", "<answer>[14, 14, 42, 42]</answer>", "<answer>[42, 14, 14, 42]</answer>"]
    assert accuracy_reward(texts, [[14, 14, 42, 42]] * 3) == [0, 1, 0]


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
