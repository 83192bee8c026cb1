"""Text from a model put into Markdown: whatever it is, a parser finds one block of code, or one line, with it."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from vgr_trl.reporting.markdown import fenced, fenced_json, inline, number, preview, table
from vgr_trl.utils import printable

PARSER = MarkdownIt("commonmark").enable("table")
# Pieces that mean something to Markdown, HTML, terminals and editors, beside any character at all.
PIECES = st.sampled_from(
    ["```", "`", "~~~", "# ", "\n", "\r", "\r\n", "\n\n", "- ", "> ", "| ", "---", "    ", "\t", "<script>", "<!--",
     "-->", "</details>", "[a](b)", "![", "**", "&lt;", "\\", "\x1b[31m", "\x00", "\x0b", "\x0c", "\x85", "\u2028",
     "\u202e", "=====", "$$", "1. ", "\ud800", "\x7f", "```text\n"]
)  # fmt: skip
ANY = st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)


def kinds(markdown):
    return [(token.type, token.level) for token in PARSER.parse(markdown)]


@given(ANY)
@example("```\n# not a heading\n```")
@example("\n`````\n````")
@example("~~~")
def test_text_in_a_fence_is_one_block_of_code_between_its_neighbours(text):
    tokens = PARSER.parse(f"before\n\n{fenced(text)}\nafter\n")
    assert [token.type for token in tokens] == [
        "paragraph_open", "inline", "paragraph_close", "fence", "paragraph_open", "inline", "paragraph_close",
    ]  # fmt: skip
    assert tokens[3].content == printable(text) + "\n"
    assert (tokens[1].content, tokens[5].content) == ("before", "after")


@given(ANY)
@example("a | b")
@example("\\|")
@example("\\")
@example("<b>")
def test_text_in_a_cell_is_text_in_that_cell(text):
    tokens = PARSER.parse(table(["name", "mean"], [[inline(text), "1"]]) + "\nafter\n")
    plain = PARSER.parse(table(["name", "mean"], [["x", "1"]]) + "\nafter\n")
    assert [token.type for token in tokens] == [token.type for token in plain]
    cell = next(token for token in tokens if token.type == "td_open")
    shown = tokens[tokens.index(cell) + 1]
    assert {child.type for child in shown.children} <= {"text", "text_special"}
    assert "".join(child.content for child in shown.children) == " ".join(printable(text).split())


@given(ANY)
def test_text_in_a_heading_is_text_in_that_heading(text):
    tokens = PARSER.parse(f"## a {inline(text)}\n\nafter\n")
    assert [token.type for token in tokens] == [
        "heading_open", "inline", "heading_close", "paragraph_open", "inline", "paragraph_close",
    ]  # fmt: skip
    assert {child.type for child in tokens[1].children} <= {"text", "text_special"}


@given(ANY)
def test_printable_text_has_no_control_characters_and_fits_into_utf_8(text):
    shown = printable(text)
    shown.encode("utf-8")
    assert not any(unicodedata.category(character) == "Cc" for character in shown if character not in "\n\t")
    assert not set(shown) & set("\x00\x07\x08\r\x0b\x0c\x1b\x7f\x85\u2028\u2029\u202e\u2066")
    assert shown.splitlines() == shown.split("\n")[: len(shown.splitlines())]


def test_control_characters_are_shown_as_numbers():
    assert printable("\x1b[31mred\x00\u202e\x85\r\nnext\rlast") == "\\x1b[31mred\\x00\\u202e\\x85\nnext\\x0dlast"
    assert printable("é ü 红 👍 \t") == "é ü 红 👍 \t"


def test_a_fence_is_longer_than_any_in_the_text():
    assert fenced("a") == "```text\na\n```\n"
    assert fenced("a ```` b") == "`````text\na ```` b\n`````\n"


def test_json_has_a_line_per_item_and_null_for_nan():
    assert fenced_json({"a": 0.12345678, "b": float("nan")}) == '```json\n{\n"a": 0.123457,\n"b": null\n}\n```\n'
    assert fenced_json([["é", 1.0]]) == '```json\n[\n["é", 1.0]\n]\n```\n'


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "–"), (float("nan"), "–"), (0.123456, "0.1235"), (2.0, "2"), (float("inf"), "inf")]
)
def test_numbers(value, expected):
    assert number(value) == expected


def test_previews():
    assert preview("abcdef", 3) == "abc\n[… 3 more characters]"
    assert preview("abc", 3) == preview("abc", None) == "abc"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("".join(chr(0xE0000 + ord(letter)) for letter in "hi"), r"\U000e0068\U000e0069"),  # tags, that mirror ASCII
        ("a\u200bb\u2060c\ufeffd\xade", r"a\u200bb\u2060c\ufeffd\xade"),
        ("\ufff9a\ufffab\ufffb\u206e", r"\ufff9a\ufffab\ufffb\u206e"),
        ("\u3164\uffa0\u180e\U0001d173", r"\u3164\uffa0\u180e\U0001d173"),
        ("\U000e0101\U000e01ef", r"\U000e0101\U000e01ef"),  # variation selectors, a byte each
    ],
)
def test_text_that_does_not_show_is_written_as_its_numbers(text, shown):
    assert printable(text) == shown


def test_what_emoji_and_scripts_are_joined_with_stays():
    for text in ("\U0001f469\u200d\U0001f52c", "\u2764\ufe0f", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"):
        assert printable(text) == text
