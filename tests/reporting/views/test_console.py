"""Completions on a terminal: the shades of tokens, and that no text moves the cursor."""

import io

import pytest
from hypothesis import given
from rich.console import Console
from support.made_records import completion, record
from test_markdown_text import ANY

from vgr_trl.reporting.markdown import print_record, token_shades


def printed(completion, terminal=True, width=80):
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="truecolor" if terminal else None,
                      width=width, legacy_windows=False)  # fmt: skip
    print_record(record(7, "train", completion), console)
    return console.file.getvalue()


def test_heavier_tokens_are_brighter():
    # Five weights in another order: each fifth of the ranks has a shade, from grey to yellow.
    weighed = completion(tokens=list("abcde"), weights=[0.3, 2.0, 0.2, 0.5, 1.0])
    assert token_shades(weighed) == ["#3b8ac4", "#fde725", "#8a8a8a", "#21a5a5", "#5ec962"]


def test_without_weights_tokens_with_a_small_vgr_are_brighter_and_unmeasured_ones_plain():
    assert token_shades(completion(tokens=list("abc"), vgr=[4.0, None, 0.5])) == ["#8a8a8a", "", "#21a5a5"]
    assert token_shades(completion()) == ["", ""]


def test_a_completion_is_shown_with_what_it_earned():
    shown = printed(completion(correct=True, rewards={"accuracy_reward": 1.0}, advantage=-0.5), terminal=False)
    for text in ("step 7, prompt 0", "what?", "red.", "right accuracy_reward 1, advantage -0.5"):
        assert text in shown
    assert "\x1b" not in shown


def test_colours_are_there_on_a_terminal_only():
    weighed = completion(weights=[0.5, 1.5])
    assert "\x1b[38;2;" in printed(weighed)
    assert "\x1b" not in printed(weighed, terminal=False)


@given(ANY)
def test_no_text_brings_its_own_control_characters_or_markup(text):
    shown = printed(completion(prompt=text, tokens=[text], rewards={text: 1.0}), terminal=False)
    assert not set(shown) & set("\x1b\r\x00\x07\x08\x0b\x0c\x9b\u202e")
    marked = printed(completion(tokens=["[bold]x[/bold] [link=a]"]), terminal=False)
    assert "[bold]x[/bold] [link=a]" in marked


@pytest.mark.parametrize("length", [3, None])
def test_long_prompts_are_cut(length):
    console = Console(file=io.StringIO(), width=80)
    print_record(record(0, "train", completion(prompt="abcdef")), console, prompt_length=length)
    assert ("abcdef" in console.file.getvalue()) == (length is None)
