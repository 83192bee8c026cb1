"""The table of completions, on a terminal and in trackers: no text moves a cursor, hides or reorders others."""

import io

from rich.console import Console
from trl.trainer import utils

from vgr_trl.patches import as_text, in_texts

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066b\x00\x08\r\x0b</td><script>alert(1)</script>[link=x]"
SHOWN = "a\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\u202e\\u2066b\\x00\\x08\\x0d\\x0b</td><script>alert(1)</script>[link=x]"


def test_texts_of_a_table_have_no_characters_that_do_something():
    message = {"role": "user", "content": [{"type": "text", "text": HOSTILE}]}
    assert as_text([message]) == SHOWN
    assert as_text(HOSTILE) == SHOWN
    assert as_text([{"role": "system", "content": "line\n\ttab"}]) == "line\n\ttab"
    columns = {"prompt": [[message]], "completion": [HOSTILE]}
    with in_texts(columns):
        assert columns == {"prompt": [SHOWN], "completion": [SHOWN]}


def test_the_terminal_gets_text(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200)
    monkeypatch.setattr(utils, "Console", lambda *_, **__: console)
    columns = {"prompt": ["what?"], "completion": [[{"role": "assistant", "content": HOSTILE}]]}
    with in_texts(columns):
        utils.print_prompt_completions_sample(columns["prompt"], columns["completion"], {"r": [1.0]}, [0.5], 1)
    text = shown.getvalue()
    assert "\x1b[2J" not in text
    assert not set(text) & set("\x07\x9b\u202e\u2066\x00\x08\r\x0b")
    assert "<script>alert(1)" in text
