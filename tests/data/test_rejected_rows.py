"""Rows that ask no question or have no answer are rejected, each for its reason."""

import re

import pytest

from vgr_trl.data.checked_rows import REASON, RowOptions, examine_row
from vgr_trl.data.convert import Rules, to_schema
from vgr_trl.data.prompts import PromptTemplate
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read_row import read_row
from vgr_trl.utils import DataError

RIGHT = {"problem": "Which?", "choices": ["red", "blue"], "solution": "B"}
TURN, REPLY = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "blue"}
PART = {"type": "video"}
REJECTED = {
    "its prompt is a dict": {"prompt": TURN},
    "lacks a role or a content": {"prompt": [{"role": "user", "content": 3}]},
    "give a role": {"messages": [{"role": "teacher", "content": "Which?"}, REPLY]},
    "its prompt does not end with a user message": {"prompt": [TURN, REPLY]},
    "its messages does not end with a user message": {"messages": [REPLY, {**TURN, "role": "system"}]},
    "it must be a text": {"problem": " "},
    "it has 1 options": {"choices": ["red"]},
    "it has 11 options": {"choices": list("ABCDEFGHIJK")},
    "they must be texts or numbers": {"choices": ["red", None]},
    "it must be a list": {"choices": 3},
    "became control characters": {"choices": r"['\alpha', '\beta']"},
    "carry the letters B, C instead of A": {"choices": ["B) red", "C) blue"]},
    "carry the labels 1, 2": {"choices": [{"label": "1", "text": "red"}, {"label": "2", "text": "blue"}]},
    "could be an option's text or an index": {"choices": ["1", "0"], "solution": 1},
    "none of the choices": {"solution": "C"},
    "give the right answer": {"solution": ""},
    "2 <image> placeholders, but there are 1 images": {"problem": "<image><image>", "image": "a.png"},
    "<image> beside a video": {"problem": "<image>", "video": "a.mp4"},
    "it refers to <image 2>, but there is no image_2": {"question": "<image 2>", "image_1": "a.png"},
}


@pytest.mark.parametrize("reason", REJECTED)
def test_a_row_is_rejected_for_its_reason(reason):
    row = {**RIGHT, **REJECTED[reason]}
    if {"prompt", "messages", "question"} & REJECTED[reason].keys():
        row.pop("problem")
    with pytest.raises(DataError, match=re.escape(reason)):
        read_row(row)
    read_row(RIGHT)


def test_an_answer_is_needed_only_where_it_is_read():
    row = {"problem": "Which?"}
    with pytest.raises(DataError, match="solution is None"):
        read_row(row)
    read_row(row, needs_answer=False)


def test_rows_that_fit_no_template_or_no_frames():
    user = PromptTemplate("{# nothing #}", "t", "user")
    asked = {"prompt": [TURN], "solution": "x"}
    frames = {"prompt": [{"role": "user", "content": [PART]}], "solution": "x", "video": "a.mp4"}
    for row, template, reason in (
        (RIGHT, user, "t gives an empty prompt"),
        (asked, user, "its question is a conversation, but t needs a text"),
        (frames, None, "a part of type video"),
    ):
        assert reason in examine_row(row, RowOptions(system_prompt=template))[REASON]


def test_converted_rows_have_one_question_and_the_images_of_their_set():
    rules = Rules(CONVERTERS["aokvqa"], "set")
    for row, reason in (
        ({"prompt": [{"role": "system", "content": "s"}, TURN], "solution": "x"}, "its prompt is a conversation"),
        (RIGHT, "it has 0 images, where one is expected"),
    ):
        with pytest.raises(DataError, match=reason):
            to_schema(row, rules)
    with pytest.raises(DataError, match="it has no options"):
        CONVERTERS["aokvqa"].rows({"question": "Which?"})
