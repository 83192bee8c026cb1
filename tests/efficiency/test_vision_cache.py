import random
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from support.models.compare import checkpointed, generated, gradients, largest_relative, scored, why_plain, with_head
from support.models.families import FAMILIES, OTHERS, build, make_batch, with_frozen_tower
from support.models.processors import TABLE, image_processor

from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import base_of
from vgr_trl.validate.features import plan_vision
from vgr_trl.vision import FAMILIES as TYPES
from vgr_trl.vision import (
    VisionCache,
    add_zero_features,
    images_processed_once,
    join_windows,
    parts_of_tower,
)

PROCESSORS = TABLE["image_processors"]
IMAGES, TOKENS, WIDTH = 3, 4, 32  # of a batch of the model; features of one image are TOKENS * WIDTH float32
KNOWN = {**FAMILIES, **OTHERS}
ROWS_OF_PIXELS = {"gemma3": 3, "llava": 3, "paligemma": 3, "internvl": 1 + 1 + 3}  # tiles; images elsewhere
ONCE = "are computed once per rollout"


def noise(seed, *size, mode="RGB"):
    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, pixels).convert(mode)


FIRST, SECOND, THIRD = noise(0, 70, 44), noise(1, 50, 60, mode="L"), noise(2, 70, 44)
SEVERAL = [[FIRST, SECOND], [FIRST, SECOND], [SECOND, FIRST], [SECOND, FIRST], [THIRD], [THIRD]]
SOME_WITHOUT = [[FIRST], [FIRST], [], [], [SECOND]]


def processor_of(family):
    """The processor of a family, with `calls`: how many rows each call of it made pixel inputs of."""
    processor = image_processor(**PROCESSORS[family])
    plain, processor.calls = processor.preprocess, []

    def preprocess(images, *args, **kwargs):
        processor.calls.append(len(images))
        return plain(images, *args, **kwargs)

    processor.preprocess = preprocess
    return processor


def processed_once(processor):
    return images_processed_once(SimpleNamespace(image_processor=processor))


@pytest.mark.parametrize("family", PROCESSORS)
def test_pixel_inputs_are_those_of_every_row(family):
    images = SOME_WITHOUT if family in ("qwen2_vl", "idefics3") else SEVERAL
    row_options = {"return_row_col_info": True} if family in ("idefics3", "smolvlm") else {}
    expected = processor_of(family)(images=images, return_tensors="pt", **row_options)
    processor = processor_of(family)
    with processed_once(processor):
        processor(images=images, **row_options).clear()  # as TRL calls it to tokenize, and to score
        found = processor(images=images, return_tensors="pt", **row_options)
    assert processor.calls == ([1, 1, 5] if family == "idefics3" else [1] * len({id(row[0]) for row in images if row}))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


TRANSPARENT = noise(1, 50, 60, mode="L")
TRANSPARENT.info["transparency"] = 7


@pytest.mark.parametrize(
    ("images", "rows"),
    [
        ([FIRST, FIRST], [2]),  # no rows
        ([[np.asarray(FIRST)], [np.asarray(FIRST)]], [2]),  # no images of Pillow
        ([[FIRST.convert("P")], [FIRST.convert("P")]], [2]),  # a palette
        ([[SECOND], [TRANSPARENT], [SECOND]], [1, 1]),  # the same pixels, of which some are transparent
    ],
)
def test_images_that_are_told_apart(images, rows):
    processor = processor_of("qwen2_vl")
    with processed_once(processor):
        processor(images=images)
    assert processor.calls == rows


@pytest.fixture
def model():
    return with_frozen_tower(build("gemma3"))


@pytest.fixture(scope="module")
def batch():
    return make_batch("gemma3", images=(1, 2), generations=1)


def computed(cache, model, **inputs):
    cache.metrics()
    with cache.around(model), torch.no_grad():
        model(**inputs)
    found = cache.metrics()
    return round(found["vision/computed_per_image"] * len(inputs["pixel_values"])) if found else None


def test_features_beyond_the_limit_are_computed_again(model, batch):
    """Room for two of three images; the third is computed in every pass, and drives none of the others out."""
    cache = VisionCache(base_of(model), 2 * TOKENS * WIDTH * 4 / 2**20)
    assert [computed(cache, model, **batch.inputs) for _ in range(3)] == [IMAGES, 1, 1]
    cache.clear()
    assert [computed(cache, model, **batch.inputs) for _ in range(2)] == [IMAGES, 1]


def test_images_are_told_apart_by_each_pixel(model, batch):
    cache, pixels = VisionCache(base_of(model), 64), batch.inputs["pixel_values"]
    assert computed(cache, model, **batch.inputs | {"pixel_values": pixels}) == IMAGES
    assert computed(cache, model, **batch.inputs | {"pixel_values": pixels.flip(0)}) == 0
    changed = pixels.clone()
    changed[0, 0, 0, 0] *= -1
    changed[1, 0, [0, 1]] = changed[1, 0, [1, 0]]  # rows exchanged
    assert computed(cache, model, **batch.inputs | {"pixel_values": changed}) == 2


@pytest.mark.parametrize("name", sorted(TYPES))
def test_features_are_computed_once_for_generation_scoring_and_training(name):
    model = with_head(with_frozen_tower(build(KNOWN[name])))
    batch = make_batch(KNOWN[name], images=(1, 2), generations=2)
    tokens, expected = generated(model, batch, sample=False), gradients(model, batch)
    with torch.no_grad():
        logps, _ = scored(model, batch)
    cache, calls = VisionCache(base_of(model), 64), []
    parts_of_tower(base_of(model))[0].register_forward_hook(lambda *call: calls.append(1))
    with cache.around(model):
        assert torch.equal(generated(model, batch, sample=False), tokens)
        with torch.no_grad():
            assert (scored(model, batch)[0] - logps).abs().max() < 1e-5
        with share_prompts(model, batch.completion_length):  # the training pass
            assert largest_relative(expected, gradients(model, batch)) < 1e-4
    assert len(calls) == 1
    images = ROWS_OF_PIXELS.get(name, 3)  # of two prompts
    plain = name == "paligemma" or why_plain(model) is not None
    wanted = (2 + 2 + (2 if plain else 1)) * images  # by two completions of each, or once where shared
    assert cache.metrics() == {"vision/computed_per_image": images / wanted}


@pytest.mark.parametrize("name", sorted(name for name, family in KNOWN.items() if family.picture and name != "llama4"))
def test_image_features_added_as_nothing_reach_all_weights_that_images_do(name):
    """So an optimizer moves a tower by a micro-batch whose images are left out as by one whose images have no loss."""
    model = build(KNOWN[name])
    base, batch = base_of(model), make_batch(KNOWN[name], generations=1)
    inputs = {key: value for key, value in batch.inputs.items() if key in signature(base.get_image_features).parameters}

    def reached(batch, around):
        model.zero_grad(set_to_none=True)
        with around:
            model(**batch.inputs).logits.sum().backward()
        return {name for name, parameter in model.named_parameters() if parameter.grad is not None}

    text = make_batch(KNOWN[name], images=(0, 0), generations=1)
    added = add_zero_features(base, lambda base: base.get_image_features(**inputs))
    assert reached(text, added) == reached(batch, nullcontext()) > reached(text, nullcontext())


def plan(model, *, megabytes=64, images=True, compiles=False, sharded=False):
    args = SimpleNamespace(vision_cache_megabytes=megabytes)
    facts = SimpleNamespace(args=args, model=model, has_images=images, compiles=compiles, is_sharded=sharded)
    return str(plan_vision(facts)).removeprefix(f"vision_cache_megabytes={megabytes}: image features ")


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({}, ONCE), ({"megabytes": 0}, "are computed in every pass (switched off)"),
        ({"images": False}, "are computed in every pass (data without images)"),
        ({"compiles": True}, "are computed in every pass (torch.compile)"),
        ({"sharded": True}, "are computed in every pass (sharded parameters"),
    ],
)  # fmt: skip
def test_launches(launch, expected):
    adapted = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert plan(adapted, **launch).startswith(expected)


@pytest.mark.parametrize("target", [["qkv"], r".*merger\.mlp\.0"])
def test_towers_whose_features_change(target):
    model = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=target))
    assert plan(model) == "are computed in every pass (the vision tower trains)"
    for parameter in model.parameters():  # the reference is the model without them, or with others
        parameter.requires_grad_(False)
    assert plan(model) == "are computed in every pass (adapters in the vision tower, which the reference may leave out)"
    model = with_frozen_tower(build("gemma3"))
    for module in model.model.vision_tower.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.1
    assert plan(model) == "are computed in every pass (dropout in the vision tower)"


def counted_calls():
    name = "scaled_dot_product_attention"
    return patch.object(torch.nn.functional, name, wraps=getattr(torch.nn.functional, name))


def features_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    outputs = model.model.get_image_features(
        batch.inputs["pixel_values"].double(), image_grid_thw=batch.inputs["image_grid_thw"]
    )
    features = torch.cat(list(outputs.pooler_output))
    (features * torch.arange(features.numel()).view_as(features)).sum().backward()
    return features.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_features_and_gradients(name, checkpointing):
    model, batch = build(name).double().train(), make_batch(name, images=(1, 2))
    if checkpointing:
        checkpointed(model)
    with counted_calls() as plain_calls:
        features, gradients = features_and_gradients(model, batch)
    assert join_windows(model) == 2
    with counted_calls() as calls:
        joined, joined_gradients = features_and_gradients(model, batch)
    assert calls.call_count < plain_calls.call_count / 2
    assert (joined - features).abs().max() < 1e-12
    assert largest_relative(gradients, joined_gradients) < 1e-9


def test_a_family_without_windows():
    assert join_windows(build("gemma3")) == 0
