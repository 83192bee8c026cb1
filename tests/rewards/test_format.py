"""The format reward, by hand from `Rewards` in definitions.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.errors import RewardError
from vgr_trl.rewards import think_format_reward


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        " \n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n",
        "<think>a < b and c > d</think> <answer></answer>",
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


@given(st.text(max_size=50))
def test_text_around_the_parts_is_not_allowed(text):
    expected = float(not text.strip())
    assert think_format_reward([f"{text}<think>a</think><answer>b</answer>"]) == [expected]
    assert think_format_reward([f"<think>a</think>{text}<answer>b</answer>"]) == [expected]
