"""Which letter a statement states: two different ones in one statement are wrong, words are no letters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgr_trl.rewards import accuracy_reward
from vgr_trl.rewards.answers import names_another, read_labelled, read_letter

CHOICES = ["red", "green", "blue dog", "a big dog"]


def stated(text, choices=CHOICES):
    """The letters for which `text` is right."""
    rewards = accuracy_reward([text] * len(choices), list(range(len(choices))), [choices] * len(choices))
    return "".join(letter for letter, reward in zip("ABCDEFGHIJ", rewards, strict=False) if reward)


NOTHING = [
    # two letters
    "Answer: A; B; C; D", "Answer: A. Or B.", "Answer: A, red. B, green.", "答案：A。B也可能", "Answer: A; B",
    "Answer: A;B",
    "Answer: A. B", "Answer: A.B", "Answer: A B", "Answer: A, B", "Answer: A,B.", "Answer: A / B", "Answer: A/B",
    "Answer: A|B",
    "Answer: A & B", "Answer: A and B", "Answer: A and C", "Answer: A or B", "Answer: A - B", "Answer: A-D",
    "Answer: A–D",
    "Answer: A to D", "Answer: A (B)", "Answer: A. (B)", "Answer: A [B]", "Answer: A. [B]", "Answer: A, maybe B",
    "Answer: A? B!",
    "Answer: A. Maybe B?", "Answer: A. or b.", "Answer: A, or possibly (b)", "Answer: a; b", "Answer: a, b",
    "Answer: a. or b",
    "Answer: A. Option B", "Answer: A. I mean B", "Answer: A. No, B.", "Answer: A! B!", "Answer: A. A and B",
    "Answer: A。或B",
    "Answer: A, not B", "Answer: A because B is wrong", "Answer: A. Or J.", "Answer: **A** or **B**",
    "Answer: **A**, **B**",
    "**Answer:** A. **B**", "Answer: Ａ；Ｂ", "答案：A、B", "答案：A或B", "答案：A和B", "答案：A，B",
    "答案是A。也可能是B。", "答案是A或者B",
    "答案：A。或者选项B", "选项 A、B", "选A或B", "The answer is A or B", "The answer is A. Or B.",
    "The answer is A. B is possible.",
    "The answer is A, then B", "The answer is either A or B", "The answer is A; also B", "Answer: A; I",
    "Answer: A or I",
    "Answer: A. I is possible", "Answer: A.\nB.", "Answer: A\nB", "Answer: A\nB\nC\nD", "Answer:\nA\nB",
    "Answer: A\nor B",
    "Answer: A\n\nB.", "Answer: A\n- B", "Answer: A. B's as good", "Answer: A, red or green", "Answer: A. red, green",
    "Answer: A. red and green", "Answer: A, green", "Answer: A. Green.", "Answer: A; blue dog",
    "Answer: A. red / green",
    "\\boxed{A} or \\boxed{B}", "\\boxed{A}, \\boxed{B}", "$\\boxed{A}$ and $\\boxed{B}$", "\\boxed{A} or B",
    "\\boxed{A}/B",
    "A or \\boxed{B}", "Answer: A or \\boxed{B}", "\\boxed{A,B}", "\\boxed{A or B}", "\\boxed{A}或\\boxed{B}",
    "\\boxed{A \\text{ or } B}",
    "<answer>A; B</answer>", "<answer>A. Or B.</answer>", "<answer>A, red. B, green.</answer>",
    "<answer>A。B也可能</answer>",
    "<answer>A, B</answer>", "<answer>A/B</answer>", "<answer>A and C</answer>", "<answer>A (B)</answer>",
    "<answer>(A)(B)</answer>",
    "<answer>A. red B. green</answer>", "<answer>A. red, green</answer>", "<answer>red, green</answer>",
    "<answer>red or green</answer>",
    "<answer>**A** **B**</answer>", "<answer>Ａ Ｂ</answer>", "<answer>A-B</answer>", "<answer>A|B</answer>",
    "<answer>A\nB</answer>",
    # refused letters
    "The answer is not A", "Answer: not A", "The answer isn't A", "答案不是A", "不选A", "不能选A", "不应选（A）",
    "排除选项A", "别选A",
    "It is not (A)", "It can't be (A)", "It is not option (A)", "不是（A）", "Wrong answer: A",
    "The incorrect answer: A", "错误答案：A",
    "Answer: A is wrong", "The answer is A or not", "Answer: A?", "Answer: anything but A", "Answer: non-A",
    "Answer: neither A",
    "(A) or (B)", "(A), (B)", "（A）（B）", "(a) red, (B) green",
    # words
    "Answer: a big cat", "The answer is a big dog", "The answer is A cat", "The answer is a dog", "Answer: A cat",
    "Answer: A big dog",
    "<answer>A cat</answer>", "<answer>a bigger dog</answer>", "<answer>A big cat</answer>", "Answer: I think",
    "Answer: I don't know",
    "The answer is I", "Answer: A-", "Answer: A+", "Answer: A'", "Answer: A1", "Answer: A_1", "Answer: Apple",
    "Answer: AA",
    "<answer>A red one</answer>", "<answer>A: green</answer>", "<answer>A. green</answer>",
    "<answer>(A) green</answer>", "<answer>A. a big dog</answer>", "答案是A型血", "Answer: C-shaped",
    "Answer: vitamin C",
    # no letter at all, or one beyond the choices
    "", "A", "Answer:", "Answer: ", "<answer></answer>", "<answer>\u200b</answer>", "<answer>.</answer>", "\\boxed{}",
    "Answer: E",
    "<answer>E</answer>", "<answer>K</answer>", "(E)", "Answer: Α", "Answer: А", "Answer: 1", "<answer>0</answer>",
    "Answer: Ⓐ",
    "<think>Answer: A</think>", "<think><answer>A</answer></think>", "<think>Answer: A", "<answer>A",
    "</answer>A<answer>",
    "<answer>Answer: A</answer>", "<answer>Option A</answer>", "<answer>The answer is A</answer>",
    "<ANSWER>A; B</ANSWER>",
    "<answer><think>A</think></answer>",
]  # fmt: skip


@pytest.mark.parametrize("text", NOTHING)
def test_states_no_single_option(text):
    assert stated(text) == ""


ONE = [
    ("Answer: A", "A"), ("Answer: A.", "A"), ("Answer: A!", "A"), ("Answer: A; red", "A"), ("Answer: A, red.", "A"),
    ("Answer: A red", "A"), ("<answer>A red</answer>", "A"),
    ("Answer: A. red, as seen.", "A"), ("Answer: A (red)", "A"), ("Answer: A. A and only A.", "A"),
    ("Answer: D. a big dog", "D"),
    ("Answer: D, a big dog.", "D"), ("Answer: D. A big dog.", "D"), ("Answer: D. A big dog. It barks.", "D"),
    ("Answer: B. I think so.", "B"),
    ("Answer: B. I'm sure.", "B"), ("Answer: B, since x = 2", "B"), ("Answer: B because f(x) > 0", "B"),
    ("Answer: B, a fine one", "B"),
    ("Answer: b, a fine one", "B"), ("Answer: b", "B"), ("Answer: B\nIt is a plant.", "B"),
    ("Answer: B\nSo I say.", "B"),
    ("Answer: B\n\nBecause it grows.", "B"), ("**Answer: B**", "B"), ("**B** is my guess. Answer: **B**", "B"),
    ("Answer: (b)", "B"),
    ("Wrong answer: A\nAnswer: B", "B"), ("Wrong answer: A. The answer is B", "B"), ("不选A，选B", "B"),
    ("排除选项A，答案：B", "B"),
    ("答案：B。因为是草。", "B"), ("答案：Ｂ", "B"), ("答案：（Ｂ）", "B"), ("选项B，绿色", "B"), ("故选B。", "B"),
    ("\\boxed{B}. Not A.", "B"),
    ("A, B and C are shown. \\boxed{B}", "B"), ("Of A and B I choose \\boxed{B}", "B"), ("\\boxed{B}, the second", "B"),
    ("not \\boxed{A}. So \\boxed{B}", "B"), ("<answer>A</answer><answer>B</answer>", "B"),
    ("<answer>A; <answer>B</answer></answer>", "B"),
    ("<answer>A</answer> or <answer>B</answer>", "B"), ("<answer><answer>B</answer></answer>", "B"),
    ("<Answer>B</Answer>", "B"),
    ("<answer>A or B</answer> so <answer>B</answer>", "B"), ("<answer>B</answer> Answer: A", "B"),
    ("Answer: A <answer>B</answer>", "B"),
    ("<answer>**B**</answer>", "B"), ("<answer>B. **green**</answer>", "B"), ("<answer>a big dog</answer>", "D"),
    ("<answer>A BIG DOG.</answer>", "D"), ("<answer>Blue  dog</answer>", "C"), ("<answer>C. Blue dog</answer>", "C"),
    ("It is (B).", "B"),
    ("(B), as (b) grows", "B"), ("I would not say so, but (B)", "B"), ("<answer>Ｂ．green</answer>", "B"),
    ("The answer is option B", "B"),
    ("The answer is (B) green", "B"), ("The answer is **B**.", "B"), ("the  best answer is: B", "B"),
    ("The answer is B; it grows", "B"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "letter"), ONE)
def test_states_one_option(text, letter):
    assert stated(text) == letter


LETTER = st.sampled_from("ABCDEFGHIJ")
SEPARATOR = st.sampled_from(
    [
        "; ",
        ";",
        ", ",
        ",",
        " or ",
        " and ",
        ". Or ",
        "/",
        " & ",
        "、",
        "。",
        " 或 ",
        " - ",
        "\n",
        ".\n",
        ") (",
        ". Maybe ",
        ", not ",
    ]
)
FORM = st.sampled_from(
    [
        "Answer: {}",
        "答案：{}",
        "The answer is {}.",
        "\\boxed{{{}}}",
        "<answer>{}</answer>",
        "选项 {}",
        "**Answer:** ({})",
    ]
)


@settings(max_examples=300)
@given(st.lists(LETTER, min_size=2, max_size=4, unique=True), SEPARATOR, FORM, st.booleans())
def test_two_letters_in_a_statement_are_no_option(letters, separator, form, lower):
    text = separator.join(letters)
    text = form.format(text.lower() if lower else text)
    choices = [f"option number {i}" for i in range(10)]
    assert stated(text, choices) == ""
    assert accuracy_reward([text], ["B"]) == [0.0]
    assert accuracy_reward([text], label_idx=[1]) == [0.0]


@given(LETTER, st.from_regex(r"[a-z]{2,8}( [a-z]{2,8}){0,2}", fullmatch=True), st.booleans())
def test_a_word_behind_the_letter_makes_it_no_letter(letter, words, lower):
    """`a big dog` and `A cat` are texts; only the option's own text, or a mark, may follow a letter."""
    letter = letter.lower() if lower else letter
    assert read_letter(f"{letter} {words}", ["nothing"] * 10) is None
    assert read_letter(f"{letter} {words}", [words] * 10) == letter.upper()


@pytest.mark.parametrize(
    ("text", "letter", "expected"),
    [
        ("it is green", "A", False), ("B", "A", True), ("A", "A", False), ("a", "A", False), ("b", "A", True),
        ("so b", "A", False),
        ("so b", "a", True), ("or b", "A", True), ("(b)", "A", True), ("I think", "A", False), ("I", "A", True),
        ("I or J", "A", True),
        ("a dog", "B", False), ("a or c", "b", True), ("a is as good", "b", True), ("A dog", "B", True),
        ("U.S.A", "A", True),
        ("B2 or C3", "A", False), ("it's", "A", False), ("B's", "A", True), ("也可能是B", "A", True),
        ("Ｂ", "A", True), ("", "A", False),
        ("naïve D", "A", True), ("I'm", "B", False), ("x and y", "A", False), ("x = 3", "A", False),
    ],
)  # fmt: skip
def test_naming_another_option(text, letter, expected):
    assert names_another(text, letter) == expected


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B) blue", "B"), ("(b) blue", "B"), ("( B ) blue", "B"), ("B )blue", "B"), ("（Ｂ）blue", "B"),
        ("**B) blue**", "B"), ("B)", None),
        ("B", None), ("B. blue", None), ("B blue", None), ("K) blue", None), ("B) blue C) red", None),
        ("B) blue\nred", None),
        ("AB) blue", None), ("f(b) blue", None), ("(B blue", None),
    ],
)  # fmt: skip
def test_labelled_options(text, letter):
    assert read_labelled(text) == letter
