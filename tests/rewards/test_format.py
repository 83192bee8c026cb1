"""The format reward, by hand from `Rewards` in definitions.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.rewards import think_format_reward
from vgr_trl.rewards.answers import completion_text
from vgr_trl.rewards.simple import tag_count_reward
from vgr_trl.utils import RewardError


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        " \n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n",
        "<think>a < b and c > d</think> <answer>-1</answer>",
        "<think>看图</think><answer>五</answer>",
        "<think>... 7 ...</think><answer>(B)</answer>",
        "<think>\u200bо\u200b</think><answer>½</answer>",
    ],
)
def test_well_formed(text):
    assert think_format_reward([text, [{"role": "assistant", "content": text}]]) == [1.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "<think></think><answer>b</answer>",
        "<think> \n </think><answer>b</answer>",
        "<think>a</think>",
        "<answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a<answer>b</answer></think>",
        "<think>a<answer></think>b</answer>",
        "x<think>a</think><answer>b</answer>",
        "<think>a</think>x<answer>b</answer>",
        "<think>a</think><answer>b</answer>x",
        "<think>a</think><think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>b</answer>",
        "<think><think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer></answer>",
        "<think>a<answer>b</answer>",
        "a</think><answer>b</answer>",
        "<think>a</think><answer></answer>",
        "<think>a</think><answer> \n </answer>",
        "<think>a</think><answer>?</answer>",
        "<think>a</think><answer>\u200b\ufeff</answer>",
        "<think>...</think><answer>b</answer>",
        "<think>—。！…</think><answer>b</answer>",
        "<think>\u200b\u200c\u200d\u2060\ufeff\u00ad</think><answer>b</answer>",
        "<think>\u3164\u115f\u1160\uffa0</think><answer>b</answer>",
        "<think>\u2800\u0301\u034f\ue000</think><answer>b</answer>",
        "<think>🤔</think><answer>b</answer>",
        "<THINK>a</THINK><ANSWER>b</ANSWER>",
    ],
)
def test_badly_formed(text):
    assert think_format_reward([text]) == [0.0]


def test_called_as_trl_calls_it():
    completions = [[{"role": "assistant", "content": [{"type": "text", "text": "<think>a</think><answer>b</answer>"}]}]]
    assert think_format_reward(prompts=["?"], completions=completions, completion_ids=[[1]], trainer_state=None,
                               solution=["B"], log_extra=print, log_metric=print) == [1.0]  # fmt: skip


def test_completion_that_is_no_text_is_an_error():
    with pytest.raises(RewardError, match=r"^A completion is a int: pass a string"):
        think_format_reward([1])


@given(st.text(st.characters(categories=("P", "S", "Z", "C", "M"), exclude_characters="<>"), max_size=20))
def test_thought_or_answer_without_letter_digit_or_ideograph_is_empty(text):
    assert think_format_reward(
        [f"<think>{text}</think><answer>b</answer>", f"<think>a</think><answer>{text}</answer>"]
    ) == [0, 0]
    assert think_format_reward([f"<think>{text}a</think><answer>{text}5</answer>"]) == [1]


@given(st.text(max_size=50))
def test_text_around_the_parts_is_not_allowed(text):
    expected = float(not text.strip())
    assert think_format_reward([f"{text}<think>a</think><answer>b</answer>"]) == [expected]
    assert think_format_reward([f"<think>a</think>{text}<answer>b</answer>"]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nred\n</think>\n<answer>\nA\n</answer>", 1.0),
        ("<think>\nred</think>\n<answer>\nA\n</answer>", 0.75),
        ("<think>red</think><answer>A</answer>", 0.0),
        ("<think>\n<think>\nred", 0.0),
        ("red\n</answer>", 0.25),
    ],
)
def test_tags_on_lines_of_their_own_count_a_quarter_each(text, expected):
    assert tag_count_reward([[{"role": "assistant", "content": text}]]) == [expected]


def test_what_is_written_around_a_tool_is_on_lines_of_its_own():
    parts = [{"role": "assistant", "content": text} for text in ("<think>a</think>", "<answer>b</answer>")]
    assert completion_text([parts[0], {"role": "tool", "content": "c"}, parts[1]]) == (
        "<think>a</think>\n<answer>b</answer>"
    )
