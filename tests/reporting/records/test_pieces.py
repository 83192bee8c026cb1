"""Tokens as pieces of text, of a tokenizer of bytes and of one that drops the first space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.reporting.records import prompt_text, token_pieces

TOKENIZER = build_processor(["what colour is the circle?", "red blue", "a red"]).tokenizer


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_pieces_of_any_text_are_the_text(text):
    ids = TOKENIZER(text).input_ids
    pieces = token_pieces(ids, decode)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_pieces_of_any_tokens_are_the_text_also_where_bytes_are_none(ids):
    pieces = token_pieces(ids, decode)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last():
    ids = TOKENIZER("é").input_ids  # two bytes, which no token joins
    assert len(ids) == 2
    assert token_pieces([*ids, *TOKENIZER(" red").input_ids], decode) == ["", "é", " red"]


def test_spaces_at_the_start_of_tokens_survive_a_tokenizer_that_drops_the_first():
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    assert backend.decode([0, 1, 2]) == "a bc"
    assert token_pieces([0, 1, 2], backend.decode) == ["a", " b", "c"]


def test_the_tokens_of_an_image_are_one_word_in_a_prompt():
    image = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
    red, blue = TOKENIZER("red").input_ids, TOKENIZER(" blue").input_ids
    assert prompt_text([image] * 4 + red + [image] + blue, [image], decode) == "<image>red<image> blue"
    assert prompt_text(red, [image], decode) == "red"


@pytest.mark.parametrize("ids", [[], [5]])
def test_short_lists(ids):
    assert token_pieces(ids, decode) == [decode([token]) for token in ids]
