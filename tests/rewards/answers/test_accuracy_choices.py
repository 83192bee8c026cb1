"""Multiple choice: which option a completion chooses, by hand from `Stated answer` in definitions.md."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgr_trl.rewards import accuracy_reward
from vgr_trl.utils import RewardError

CHOICES = ["red cat", "blue dog", "A green bird", "7"]


def reward(text, solution="B", choices=CHOICES):
    return accuracy_reward([text], [solution], [choices])[0]


RIGHT = [
    "<answer>B</answer>",
    "<answer> b </answer>",
    "<answer>Ｂ</answer>",
    "<answer>ｂ。</answer>",
    "<answer>(B)</answer>",
    "<answer>（Ｂ）</answer>",
    "<answer>B.</answer>",
    "<answer>B:</answer>",
    "<answer>B：</answer>",
    "<answer>B)</answer>",
    "<answer>**B**</answer>",
    "<answer>$\\boxed{B}$</answer>",
    "<answer>\n(B) blue dog\n</answer>",
    "<answer>B. Blue  Dog.</answer>",
    "<answer>B: blue dog</answer>",
    "<answer>blue dog</answer>",
    "<answer>BLUE\nDOG.</answer>",
    "<answer>A</answer> no: <answer>B</answer>",
    "<think>Answer: A</think><answer>B</answer>",
    "The image shows (A) and (C). Answer: B",
    "Answer: (B)",
    "**Answer:** B",
    "**Answer**: B",
    "Answer:\nB",
    "Final Answer: B. blue dog",
    "answer：B",
    "Answer: A. Wait.\nAnswer: B",
    "答案：B",
    "答案: (B)",
    "正确答案是B。因为图中有狗。",
    "答案是 Ｂ，因为蓝色。",
    "选项 B",
    "选项B。",
    "故选：B",
    "应选（B）",
    "The answer is B",
    "the answer is: b.",
    "So the final answer is (B).",
    "The correct answer is option B.",
    "The answer is B. The animal barks.",
    "The answer is B because it barks.",
    "The answer is B, blue dog.",
    "So \\boxed{B}",
    "\\boxed{\\text{B}}",
    "\\boxed{(B)}. Done",
    "Answer: $\\boxed{B}$",
    "The answer is \\(B\\).",
    "It must be (B), as (b) is blue.",
    "结果（Ｂ）",
    "reasoning from the prompt's think tag, Answer: A</think>Answer: B",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right_option_is_recognised_and_no_other(text):
    assert reward(text, "B") == 1.0
    assert [reward(text, other) for other in ("A", "C", "D")] == [0.0, 0.0, 0.0]


WRONG = [
    "",
    "B",
    "blue dog",
    "<answer></answer>",
    "<answer> \n </answer>",
    "<answer></answer> Answer: B",
    "<answer>A or B</answer>",
    "<answer>A, B</answer>",
    "<answer>AB</answer>",
    "<answer>B A</answer>",
    "<answer>A\nB</answer>",
    "<answer>B. red cat</answer>",
    "<answer>B blue cat</answer>",
    "<answer>B because it barks</answer>",
    "<answer>J</answer>",
    "<answer>E</answer>",
    "<answer>X</answer>",
    "<answer>blue</answer>",
    "<answer>Bee</answer>",
    "<answer>B-</answer>",
    "<answer>B'</answer>",
    "<think><answer>B</answer></think>",
    "<think>Answer: B",
    "Answer: B</think>",
    "<think>Answer: B</think> nothing more",
    "Answer: B or C",
    "Answer: B/C",
    "Answer: B, C",
    "Answer: B. C.",
    "Answer: B. red cat",
    "答案：B、C",
    "答案：B和C",
    "The answer is not B",
    "The answer is A cat",
    "The answer is a big dog",
    "The answer is B. red cat.",
    "The answer is unclear (B)",
    "\\boxed{}",
    "\\boxed{B",
    "\\boxed{A, B}",
    "(A) or (B)",
    "f(B) is a function",
    "(E)",
]


@pytest.mark.parametrize("text", WRONG)
def test_no_single_option_is_stated(text):
    assert [reward(text, letter) for letter in "BCD"] == [0.0, 0.0, 0.0]


def test_letter_counts_before_the_text_of_another_option():
    choices = ["B", "A", "x"]
    assert accuracy_reward(["<answer>B</answer>"] * 2, [0, 1], [choices] * 2) == [0.0, 1.0]


def test_letter_that_no_option_has_is_read_as_text():
    """Options F, G, H have the letters A, B, C, so F can only be the text of the first."""
    assert accuracy_reward(["<answer>F</answer>"], ["F"], [["F", "G", "H"]]) == [1.0]


def test_text_of_two_options_chooses_neither():
    assert accuracy_reward(["<answer>cat</answer>"], [0], [["cat", "Cat.", "dog"]]) == [0.0]


def test_option_text_may_start_with_a_letter_word():
    assert reward("<answer>A green bird</answer>", "C") == 1.0
    assert reward("<answer>A green bird</answer>", "A") == 0.0


@pytest.mark.parametrize(
    "solution", ["B", "b", "(B)", "Ｂ", "B. blue dog", 1, 1.0, np.int64(1), np.float32(1), "blue dog"]
)
def test_every_kind_of_solution(solution):
    assert reward("<answer>B</answer>", solution) == 1.0
    assert reward("<answer>A</answer>", solution) == 0.0


def test_string_of_digits_is_an_option_text_and_no_index():
    assert reward("<answer>D</answer>", "7") == 1.0
    assert reward("<answer>D</answer>", "3") is None


@pytest.mark.parametrize(
    "solution", [None, "", " ", float("nan"), "E", "J", 4, -1, True, 1.5, "pig", ["B"], {}, 10**400]
)
def test_row_with_an_unusable_solution_is_not_applicable(solution):
    assert reward("<answer>B</answer>", solution) is None


@pytest.mark.parametrize("choices", [[], ["one"], ["x"] * 11, "red", 3, ["a", None], ["a", " "], [["a"], ["b"]]])
def test_row_with_unusable_choices_is_not_applicable(choices):
    assert reward("<answer>B</answer>", "B", choices) is None


def test_label_idx_stands_in_for_solution():
    completions = ["<answer>B</answer>"] * 3
    assert accuracy_reward(completions, choices=[CHOICES] * 3, label_idx=[1, "B", 0]) == [1.0, 1.0, 0.0]
    mixed = accuracy_reward(completions, [None, "B", None], [CHOICES] * 3, label_idx=[1, 0, None])
    assert mixed == [1.0, 1.0, None]


def test_rows_without_any_solution_are_not_applicable():
    assert accuracy_reward(["<answer>B</answer>"] * 2) == [None, None]


def test_called_as_trl_calls_it():
    logged = []
    rewards = accuracy_reward(
        prompts=[[{"role": "user", "content": "?"}]] * 4,
        completions=[
            [{"role": "assistant", "content": "<answer>B</answer>"}],
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "<answer>"}, {"type": "text", "text": "A</answer>"}],
                }
            ],
            [{"role": "assistant", "content": None}, {"role": "tool", "content": "<answer>B</answer>"}],
            [{"role": "tool", "content": "Answer: A"}, {"role": "assistant", "content": "Answer: 4"}],
        ],
        completion_ids=[[1], [2], [3], [4]],
        solution=["B", "B", "B", "4"],
        choices=[CHOICES, CHOICES, CHOICES, None],
        image=[object()] * 4,
        trainer_state=None,
        log_extra=lambda *row: logged.append(row),
        log_metric=lambda *row: logged.append(row),
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert all(type(value) is float for value in rewards)


def test_column_of_the_wrong_length_is_an_error():
    with pytest.raises(RewardError, match=r"^solution is 1 values for 2 completions: give a list with one value per"):
        accuracy_reward(["a", "b"], ["A"])
    with pytest.raises(RewardError, match=r"^solution is 'AB' for 2 completions"):
        accuracy_reward(["a", "b"], "AB")


def test_completion_that_is_no_text_is_an_error():
    with pytest.raises(RewardError, match=r"^A completion is a NoneType: pass a string, or a list of messages"):
        accuracy_reward([None], ["A"])
    with pytest.raises(RewardError, match=r"^The content of a message is a int: pass a string or a list of parts"):
        accuracy_reward([[{"content": 3}]], ["A"])


FORMS = (
    "<answer>{}</answer>", "<think>x</think>\n<answer>({})</answer>", "Answer: {}", "答案：{}", "选项 {}",
    "the answer is {}.",
    "\\boxed{{{}}}", "I say ({}).", "<answer>{}.</answer>",
)  # fmt: skip


@given(st.sampled_from(FORMS), st.integers(0, 9), st.integers(2, 10), st.booleans())
def test_letter_in_any_form_is_right_for_its_option_alone(form, index, count, lower):
    letter = "abcdefghij"[index] if lower else "ABCDEFGHIJ"[index]
    choices = [f"option number {i}" for i in range(count)]
    rewards = accuracy_reward([form.format(letter)] * count, list(range(count)), [choices] * count)
    assert rewards == [float(i == index) for i in range(count)]


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<answer>", "</answer>", "Answer:", "答案：", "答案是", "选项", "选", "the answer is ",
        "\\boxed{",
        "}", "(", ")", "A", "B", "Ｃ", "d", ".", "：", " ", "\n", "or", "and", "because", "blue dog", "7", "^",
        "9", "$", "\ud800",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join))
def test_any_text_is_right_for_at_most_one_option(text):
    rewards = accuracy_reward([text] * 4, [0, 1, 2, 3], [CHOICES] * 4)
    assert set(rewards) <= {0.0, 1.0}
    assert sum(rewards) <= 1


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=()), max_size=200))
def test_any_unicode_is_accepted(text):
    assert accuracy_reward([text, f"<answer>{text}"], ["B", "5"], [CHOICES, None])[0] in (0.0, 1.0)
