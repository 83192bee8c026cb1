"""Prompts with images, as vLLM has to get them; what vLLM does with them is tested in `with_vllm/`."""

from types import SimpleNamespace

import pytest
from PIL import Image
from support.models.processors import PROCESSORS

from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.patches.vllm import VLLMImages, collapse_images, plan_vllm_images, repeats_one_token
from vgr_trl.utils import ConfigError

PAD = 9  # the placeholder token of images


@pytest.mark.parametrize(
    ("ids", "images", "sizes", "expected"),
    [
        ([1, PAD, PAD, PAD, PAD, PAD, 2], 2, [2, 3], [1, PAD, PAD, 2]),  # two images that touch
        ([1, PAD, PAD, PAD, 2], 1, [4], [1, PAD, 2]),  # one run, one image: sizes are not needed
        ([PAD, PAD, 1, PAD], 2, [2], [PAD, 1, PAD]),  # a turn after a tool call has the fields of the first turn
    ],
)
def test_one_token_per_image(ids, images, sizes, expected):
    assert collapse_images([ids], [images], PAD, sizes) == [expected]


@pytest.mark.parametrize(
    ("ids", "images", "sizes"),
    [
        ([PAD, PAD, PAD, PAD], 2, None),  # (1, 3), (2, 2) or (3, 1)
        ([PAD, PAD, PAD, PAD], 2, [1, 3, 2]),  # the sizes of other images
        ([PAD, PAD, 1, PAD], 3, [2, 1, 1]),
        ([PAD, 1, PAD], 1, [2]),
    ],
)
def test_images_that_cannot_be_told_apart(ids, images, sizes):
    with pytest.raises(ConfigError):
        collapse_images([[5], ids], [0, images], PAD, sizes)


def test_the_prompts_of_the_processor_become_those_of_the_tokenizer():
    """Two images of 4 and 6 tokens, apart and touching: what vLLM wants is the text before images are expanded."""
    processor = build_processor(["what is it?"])
    image = processor.image_token
    texts = [f"what {image}{image} is", f"{image} it? {image}", "what"]
    small, large = Image.new("RGB", (56, 56)), Image.new("RGB", (84, 56))
    written = processor(text=texts, images=[[small, large], [large, small], []])
    prompts, images = written["input_ids"], [[small, large], [large, small], []]
    assert [ids.count(processor.image_token_id) for ids in prompts] == [10, 10, 0]
    guard = VLLMImages(processor.image_token_id, processor.image_processor.merge_size)
    collapsed, given = guard.prepared(prompts, images, written)
    assert collapsed == processor.tokenizer(texts)["input_ids"]
    assert given == [[small, large], [large, small], None]


def trainer_of(processor, mode="colocate") -> SimpleNamespace:
    args = SimpleNamespace(vllm_mode=mode)
    return SimpleNamespace(use_vllm=True, _is_vlm=True, args=args, processing_class=processor)


def test_what_a_trainer_needs():
    processor = build_processor(["what"])
    assert plan_vllm_images(trainer_of(processor), True) == VLLMImages(processor.image_token_id, merge_size=2)
    assert plan_vllm_images(trainer_of(processor, mode="server"), True) == VLLMImages()
    assert not repeats_one_token(SimpleNamespace(tokenizer=None))


def test_a_family_that_surrounds_images_is_refused_where_there_are_images():
    with pytest.raises(ConfigError):
        plan_vllm_images(trainer_of(PROCESSORS["gemma3"]()), True)
    later = plan_vllm_images(trainer_of(PROCESSORS["gemma3"]()), False)
    assert later.prepared([[1]], None, {}) == ([[1]], None)
    with pytest.raises(ConfigError):
        later.prepared([[1]], [["image"]], {})
