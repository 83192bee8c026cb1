"""Processors that make pixel inputs of each image of a rollout once return what they return for all completions."""

import random
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.steps import DAPO, STOCK, build_trainer, options
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOTrainer

from vgr_trl.efficiency.vision_cache import images_processed_once


def noise(seed, *size, mode="RGB"):
    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, pixels).convert(mode)


FIRST, SECOND, THIRD = noise(0, 70, 44), noise(1, 50, 60, mode="L"), noise(2, 70, 44)
ROWS = {
    "one each": [[FIRST], [FIRST.copy()], [SECOND], [SECOND], [THIRD], [FIRST]],
    "several": [[FIRST, SECOND], [FIRST, SECOND], [SECOND, FIRST], [SECOND, FIRST], [THIRD], [THIRD]],
    "some without": [[FIRST], [FIRST], [], [], [SECOND]],
}
SQUARE = {"height": 16, "width": 16}
CROPS = {
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PROCESSORS = {  # family -> module, options
    "qwen2_vl": ("qwen2_vl", {}),
    "glm4v": ("glm4v", {}),
    "llava": ("clip", {"size": {"shortest_edge": 16}, "crop_size": SQUARE}),
    "llava_next": ("llava_next", {"image_grid_pinpoints": [[16, 32], [32, 32]], "size": {"shortest_edge": 16}}),
    "gemma3": ("gemma3", {"size": SQUARE}),
    "gemma3, cut": ("gemma3", {"size": SQUARE, "do_pan_and_scan": True, **CROPS}),
    "internvl": ("got_ocr2", {"size": SQUARE, "crop_to_patches": True, "max_patches": 4}),
    "mistral3": ("pixtral", {"size": {"longest_edge": 64}}),
    "paligemma": ("siglip", {"size": SQUARE}),
    "idefics3": ("idefics3", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
    "smolvlm": ("smolvlm", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
    "idefics2": ("idefics2", {}),
    "gemma4": ("gemma4", {}),
}


def made(family, **more):
    name, settings = PROCESSORS[family]
    module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, module.__all__[0])(**settings, **more)


def counted(processor):
    """The processor with `calls`: how many rows each call of it made pixel inputs of."""
    plain, processor.calls = processor.preprocess, []

    def preprocess(images, *args, **kwargs):
        processor.calls.append(len(images))
        return plain(images, *args, **kwargs)

    processor.preprocess = preprocess
    return processor


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


@pytest.mark.parametrize("family", PROCESSORS)
def test_what_is_processed_once_is_what_is_processed_for_every_row(family):
    """Rows of several images, and for two families rows without any."""
    images = ROWS["some without" if family in ("qwen2_vl", "idefics3") else "several"]
    row_options = {"return_row_col_info": True} if family in ("idefics3", "smolvlm") else {}
    expected = made(family)(images=images, return_tensors="pt", **row_options)
    processor = counted(made(family))
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        tokenized = processor(images=images, **row_options)  # as TRL asks when it tokenizes, and when it scores
        scored = processor(images=images, return_tensors="pt", **row_options)
    assert_same(scored, expected)
    assert_same(tokenized, expected)
    assert processor.calls == [3]


def test_a_default_that_is_given_is_no_other_option():
    """TRL asks InternVL's for the tiles of images once more."""
    processor = counted(made("internvl"))
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        processor(images=ROWS["one each"], return_tensors="pt")
        processor(images=ROWS["one each"], crop_to_patches=True, return_tensors="pt")
        assert processor.calls == [3]
        cut = processor(images=ROWS["one each"], crop_to_patches=False, return_tensors="pt")
    assert processor.calls == [3, 3]
    assert cut["num_patches"].tolist() == [1] * 6


def test_changed_outputs_are_not_what_the_next_call_gets():
    processor, rows = made("internvl"), ROWS["one each"]
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        processor(images=rows).pop("num_patches")
        assert "num_patches" in processor(images=rows)


@pytest.mark.parametrize("other", [
    [FIRST, FIRST],
    [[np.asarray(FIRST)], [np.asarray(FIRST)]],
    [[FIRST.convert("P")], [FIRST.convert("P")]],
])  # fmt: skip
def test_what_is_no_row_of_plain_images_is_processed_as_it_is(other):
    processor = counted(made("qwen2_vl"))
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        processor(images=other)
    assert processor.calls == [2]


def test_transparency_tells_images_apart():
    """The transparent colour of a grey image is left out of the conversion by nothing else."""
    shown = noise(1, 56, 56, mode="L")
    hidden = shown.copy()
    hidden.info["transparency"] = 7
    processor = counted(made("qwen2_vl"))
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        processor(images=[[shown], [hidden], [shown]])
    assert processor.calls == [2]


def test_outputs_of_an_unknown_form_are_those_of_a_plain_call():
    processor = counted(made("qwen2_vl"))
    preprocess = processor.preprocess
    processor.preprocess = lambda *args, **kwargs: preprocess(*args, **kwargs) | {"more": torch.zeros(5)}
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        found = processor(images=ROWS["one each"], return_tensors="pt")
        again = processor(images=ROWS["one each"], return_tensors="pt")
    assert processor.calls == [3, 6, 6]  # seen to be unknown once
    expected = made("qwen2_vl")(images=ROWS["one each"], return_tensors="pt")
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert torch.equal(again["pixel_values"], expected["pixel_values"])


def test_processors_from_elsewhere_may_draw_lots():
    class Drawing(Qwen2VLImageProcessorPil):
        pass

    processor = counted(Drawing())
    with images_processed_once(SimpleNamespace(image_processor=processor)):
        processor(images=ROWS["one each"])
    assert processor.calls == [6]
    with images_processed_once(SimpleNamespace()):  # a tokenizer
        pass


PIXELS = ("pixel_values", "image_grid_thw")


def rollout_of(classes, vision, rows, settings, monkeypatch):
    """What generation and the first batch of a trainer have of images, and how many images were processed."""
    seen = SimpleNamespace(images=0, generated=None, batch=None)
    patchify = Qwen2VLImageProcessorPil.patchify
    generate = GRPOTrainer._generate_single_turn

    def counting(*args, **kwargs):
        seen.images += 1
        return patchify(*args, **kwargs)

    def generating(self, ids, images, fields, *args, **kwargs):
        seen.generated = {name: torch.as_tensor(fields[name]) for name in PIXELS}
        return generate(self, ids, images, fields, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Qwen2VLImageProcessorPil, "patchify", counting)
        patch.setattr(GRPOTrainer, "_generate_single_turn", generating)
        trainer = build_trainer(classes, *vision, rows, settings)
        seen.images = 0
        seen.batch = trainer._generate_and_score_completions([rows[0]] * 4 + [rows[1]] * 4)
    return seen


def test_a_rollout_has_the_pixels_of_trl(vision, image_rows, tmp_path, monkeypatch):
    settings = options(tmp_path)
    stock = rollout_of(STOCK, vision, image_rows, settings, monkeypatch)
    ours = rollout_of(DAPO, vision, image_rows, settings, monkeypatch)
    for name in PIXELS:
        assert torch.equal(ours.generated[name], stock.generated[name])
        assert torch.equal(ours.batch[name], stock.batch[name])
        assert ours.batch[name].dtype == stock.batch[name].dtype
    of_prompts, generations, calls = 2 + 1, 4, 2  # tokenized for generation, and scored
    assert stock.images == of_prompts * generations * calls
    assert ours.images == of_prompts
