"""Which tokens are the image, which the instruction; and how their ids are found."""

from types import SimpleNamespace

import pytest
import torch
from support.models.eager_reference import VISION
from support.models.families import IMAGE, PAD, VIDEO, build

from vgr_trl.demo.tiny_model import SPECIAL_TOKENS, TAGS, build_processor
from vgr_trl.signals import build_modality_masks
from vgr_trl.signals.ratios import special_token_ids, vision_token_ids
from vgr_trl.utils import ConfigError, DataError


def test_masks_by_hand():
    """Padding, <start>, image, image, <end>, two words, a video, a word; the second row is padded on the right."""
    ids = torch.tensor([[0, 7, 2, 2, 7, 20, 21, 5, 22], [2, 20, 21, 7, 22, 5, 0, 2, 20]])
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
    masks = build_modality_masks(ids, attention_mask, vision_token_ids=[2, 5], special_token_ids=[0, 7])
    assert masks.vision.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0, 0, 0]]
    assert masks.instruction.int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0, 0, 0, 0]]
    assert masks.vision.dtype == masks.instruction.dtype == torch.bool


def test_a_special_vision_token_is_vision():
    """Placeholders are special tokens of most tokenizers."""
    masks = build_modality_masks(
        torch.tensor([[2, 20]]), torch.ones(1, 2), vision_token_ids=[2], special_token_ids=[2, 0]
    )
    assert masks.vision.tolist() == [[True, False]]
    assert masks.instruction.tolist() == [[False, True]]


def test_shapes_that_differ():
    with pytest.raises(DataError, match=r"input_ids has the shape \(1, 2\) and attention_mask \(1, 3\)"):
        build_modality_masks(torch.ones(1, 2), torch.ones(1, 3), vision_token_ids=[2], special_token_ids=[])


@pytest.mark.parametrize("name", VISION)
def test_vision_tokens_of_every_family(name):
    """Some of these configs have a video token too."""
    model = build(name)
    expected = {IMAGE, VIDEO} if "qwen" in name else {IMAGE}
    assert set(vision_token_ids(model)) == set(vision_token_ids(model.config)) == expected


def test_a_text_model_has_none():
    assert vision_token_ids(build("qwen3")) == ()


def test_what_a_processor_knows():
    processor = build_processor(["what colour is this"])
    processor.video_token = "<|video_pad|>"  # as that of Qwen-VL has
    ids = processor.tokenizer.convert_tokens_to_ids
    config = SimpleNamespace()  # a model that says nothing
    assert set(vision_token_ids(config, processor)) == {ids("<|image_pad|>"), ids("<|video_pad|>")}
    special = special_token_ids(processor)
    assert set(special) == set(special_token_ids(processor.tokenizer)) == {ids(token) for token in SPECIAL_TOKENS}
    assert not {ids(tag) for tag in TAGS} & set(special), "tags of the answer are text"


def test_tokens_that_a_tokenizer_adds_as_special():
    """Markers that are no `additional_special_tokens`, but never text either."""
    processor = build_processor(["what"])
    processor.tokenizer.add_tokens(["<|marker|>"], special_tokens=True)
    assert processor.tokenizer.convert_tokens_to_ids("<|marker|>") in special_token_ids(processor)


@pytest.mark.parametrize(("known", "expected"), [(True, (9,)), (False, ())])
def test_a_processor_that_names_its_token_only(known, expected):
    """A token that the tokenizer does not know becomes that of unknown words, which is no image."""
    ids = {"<image>": 9} if known else {}
    tokenizer = SimpleNamespace(unk_token_id=3, convert_tokens_to_ids=lambda token: ids.get(token, 3))
    processor = SimpleNamespace(image_token="<image>", tokenizer=tokenizer)
    assert vision_token_ids(SimpleNamespace(), processor) == expected


def test_no_tokenizer():
    with pytest.raises(ConfigError, match="SimpleNamespace has no tokenizer: give a processor or a tokenizer"):
        special_token_ids(SimpleNamespace())


def test_padding_is_no_instruction_even_if_nobody_calls_it_special():
    masks = build_modality_masks(
        torch.tensor([[PAD, 20]]), torch.tensor([[0, 1]]), vision_token_ids=[2], special_token_ids=[]
    )
    assert masks.instruction.tolist() == [[False, True]]
