"""Images processed once per rollout, image features computed once, and why not elsewhere."""

import copy
import random
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from support.models.compare import why_plain
from support.models.families import EOS, FAMILIES, build, make_batch, with_frozen_tower
from support.models.other_families import OTHERS
from support.steps import DAPO, STOCK, build_trainer, options
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOTrainer

from vgr_trl.efficiency.vision_cache import FAMILIES as TYPES
from vgr_trl.efficiency.vision_cache import (
    VisionCache,
    images_processed_once,
    parameters_of_tower,
    parts_of_tower,
    why_not_once,
)
from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import base_of
from vgr_trl.validate import plan_vision


def noise(seed, *size, mode="RGB"):
    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, pixels).convert(mode)


FIRST, SECOND, THIRD = noise(0, 70, 44), noise(1, 50, 60, mode="L"), noise(2, 70, 44)
ONE_EACH = [[FIRST], [FIRST.copy()], [SECOND], [SECOND], [THIRD], [FIRST]]
SEVERAL = [[FIRST, SECOND], [FIRST, SECOND], [SECOND, FIRST], [SECOND, FIRST], [THIRD], [THIRD]]
SOME_WITHOUT = [[FIRST], [FIRST], [], [], [SECOND]]
SQUARE = {"height": 16, "width": 16}
CROPS = {"pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
LONGEST = {"size": {"longest_edge": 64}}
PROCESSORS = {  # family -> module, options
    "qwen2_vl": ("qwen2_vl", {}),
    "glm4v": ("glm4v", {}),
    "llava": ("clip", {"size": {"shortest_edge": 16}, "crop_size": SQUARE}),
    "llava_next": ("llava_next", {"image_grid_pinpoints": [[16, 32], [32, 32]], "size": {"shortest_edge": 16}}),
    "gemma3": ("gemma3", {"size": SQUARE}),
    "gemma3, cut": ("gemma3", {"size": SQUARE, "do_pan_and_scan": True, **CROPS}),
    "internvl": ("got_ocr2", {"size": SQUARE, "crop_to_patches": True, "max_patches": 4}),
    "mistral3": ("pixtral", LONGEST),
    "paligemma": ("siglip", {"size": SQUARE}),
    "idefics3": ("idefics3", {**LONGEST, "max_image_size": {"longest_edge": 32}}),
    "smolvlm": ("smolvlm", {**LONGEST, "max_image_size": {"longest_edge": 32}}),
    "idefics2": ("idefics2", {}),
    "gemma4": ("gemma4", {}),
}


def processor_of(family):
    """The processor of a family, with `calls`: how many rows each call of it made pixel inputs of."""
    name, settings = PROCESSORS[family]
    module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return counted(getattr(module, module.__all__[0])(**settings))


def counted(processor):
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
    """Rows of several images, and for two families rows without any."""
    images = SOME_WITHOUT if family in ("qwen2_vl", "idefics3") else SEVERAL
    row_options = {"return_row_col_info": True} if family in ("idefics3", "smolvlm") else {}
    expected = processor_of(family)(images=images, return_tensors="pt", **row_options)
    processor = processor_of(family)
    with processed_once(processor):
        processor(images=images, **row_options).clear()  # as TRL calls it to tokenize, and to score
        found = processor(images=images, return_tensors="pt", **row_options)
    assert processor.calls == [3]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def test_options_that_are_defaults_are_the_same_call():
    """TRL calls InternVL's once more for the tiles of images."""
    processor = processor_of("internvl")
    with processed_once(processor):
        processor(images=ONE_EACH, return_tensors="pt")
        processor(images=ONE_EACH, crop_to_patches=True, return_tensors="pt")
        assert processor.calls == [3]
        whole = processor(images=ONE_EACH, crop_to_patches=False, return_tensors="pt")
    assert processor.calls == [3, 3]
    assert whole["num_patches"].tolist() == [1] * 6


TRANSPARENT = noise(1, 50, 60, mode="L")
TRANSPARENT.info["transparency"] = 7


@pytest.mark.parametrize(
    ("images", "rows"),
    [
        ([FIRST, FIRST], 2),  # no rows
        ([[np.asarray(FIRST)], [np.asarray(FIRST)]], 2),  # no images of Pillow
        ([[FIRST.convert("P")], [FIRST.convert("P")]], 2),  # a palette
        ([[SECOND], [TRANSPARENT], [SECOND]], 2),  # the same pixels, of which some are transparent
    ],
)
def test_images_that_are_told_apart(images, rows):
    processor = processor_of("qwen2_vl")
    with processed_once(processor):
        processor(images=images)
    assert processor.calls == [rows]


def test_outputs_of_an_unknown_form_are_those_of_a_plain_call():
    processor = processor_of("qwen2_vl")
    preprocess = processor.preprocess
    processor.preprocess = lambda *args, **kwargs: preprocess(*args, **kwargs) | {"more": torch.zeros(5)}
    with processed_once(processor):
        found = [processor(images=ONE_EACH, return_tensors="pt") for _ in range(2)]
    assert processor.calls == [3, 6, 6]  # seen to be unknown once
    expected = processor_of("qwen2_vl")(images=ONE_EACH, return_tensors="pt")
    assert all(torch.equal(outputs["pixel_values"], expected["pixel_values"]) for outputs in found)


def test_processors_from_elsewhere_may_be_random():
    class Random(Qwen2VLImageProcessorPil):
        pass

    processor = counted(Random())
    with processed_once(processor):
        processor(images=ONE_EACH)
    assert processor.calls == [6]
    with images_processed_once(SimpleNamespace()):  # a tokenizer
        pass


PIXELS = ("pixel_values", "image_grid_thw")


def rollout_of(classes, vision, rows, settings, monkeypatch):
    """What generation and the first batch of a trainer have of images, and how many images were processed."""
    seen = SimpleNamespace(images=0, generated=None, batch=None)
    patchify, generate = Qwen2VLImageProcessorPil.patchify, GRPOTrainer._generate_single_turn

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
    stock, ours = (rollout_of(classes, vision, image_rows, options(tmp_path), monkeypatch) for classes in (STOCK, DAPO))
    for name in PIXELS:
        assert torch.equal(ours.generated[name], stock.generated[name])
        assert torch.equal(ours.batch[name], stock.batch[name])
        assert ours.batch[name].dtype == stock.batch[name].dtype
    of_prompts, generations, calls = 2 + 1, 4, 2  # tokenized for generation, and scored
    assert stock.images == of_prompts * generations * calls
    assert ours.images == of_prompts


IMAGES, TOKENS, WIDTH = 3, 4, 32  # of a batch of the model; features of one image are TOKENS * WIDTH float32


@pytest.fixture
def model():
    return with_frozen_tower(build("gemma3"))


@pytest.fixture(scope="module")
def batch():
    return make_batch("gemma3", images=(1, 2), generations=1)


def computed(cache, model, **inputs):
    """Images whose features a pass of the model has computed; None if it did not ask the cache."""
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


def test_generation_and_scoring_share_features_whatever_their_precision(model, batch):
    """With bf16, TRL generates without autocast and scores under it."""
    cache = VisionCache(base_of(model), 64)
    assert computed(cache, model, **batch.inputs) == IMAGES
    with torch.autocast("cpu", torch.bfloat16):
        assert computed(cache, model, **batch.inputs) == 0


def test_other_models_and_towers_that_train_are_left_alone(model, batch):
    cache = VisionCache(base_of(model), 64)
    assert computed(cache, copy.deepcopy(model), **batch.inputs) is None
    next(parameters_of_tower(base_of(model))).requires_grad_(True)  # as a schedule that unfreezes does
    assert computed(cache, model, **batch.inputs) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_images_are_told_apart_by_each_pixel(model, batch, kind):
    cache, pixels = VisionCache(base_of(model), 64), batch.inputs["pixel_values"].to(kind)
    model.to(kind)
    assert computed(cache, model, **batch.inputs | {"pixel_values": pixels}) == IMAGES
    assert computed(cache, model, **batch.inputs | {"pixel_values": pixels.flip(0)}) == 0
    changed = pixels.clone()
    changed[0, 0, 0, 0] *= -1
    changed[1, 0, [0, 1]] = changed[1, 0, [1, 0]]  # rows exchanged
    assert computed(cache, model, **batch.inputs | {"pixel_values": changed}) == 2


KNOWN = {**FAMILIES, **OTHERS}
ROWS_OF_PIXELS = {"gemma3": 3, "llava": 3, "paligemma": 3, "internvl": 1 + 1 + 3}  # tiles; images elsewhere


@contextmanager
def tower_calls(model):
    """How often the vision tower runs meanwhile."""
    calls = []
    hook = parts_of_tower(base_of(model))[0].register_forward_hook(lambda *call: calls.append(1))
    yield calls
    hook.remove()


def scored(model, batch, *, gradients):
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        logits = model(**batch.inputs).logits[:, -batch.completion_length - 1 : -1]
        logits = logits[batch.inputs["attention_mask"][:, -batch.completion_length :].bool()]  # (tokens, V)
    if gradients:
        logits.log_softmax(-1)[..., EOS].sum().backward()
    return logits.detach()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(some, others):
    assert some.keys() == others.keys()
    largest = max(float(value.abs().max()) for value in others.values())
    assert largest > 0
    assert max(float((some[name] - others[name]).abs().max()) for name in others) <= 1e-5 * largest


@pytest.mark.parametrize("name", sorted(TYPES))
def test_features_are_computed_once_for_generation_scoring_and_training(name):
    model = with_frozen_tower(build(KNOWN[name]))
    batch = make_batch(KNOWN[name], images=(1, 2), generations=2)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(**batch.prompt_inputs(), **greedy)
    logits = scored(model, batch, gradients=True)
    gradients = gradients_of(model)
    cache = VisionCache(base_of(model), 64)
    with tower_calls(model) as calls, cache.around(model):
        assert torch.equal(model.generate(**batch.prompt_inputs(), **greedy), tokens)
        assert len(calls) == 1
        assert_close({"": scored(model, batch, gradients=False)}, {"": logits})
        with share_prompts(model, batch.completion_length):  # the training pass
            assert_close({"": scored(model, batch, gradients=True)}, {"": logits})
    assert len(calls) == 1
    assert_close(gradients_of(model), gradients)
    images = ROWS_OF_PIXELS.get(name, 3)  # of two prompts
    plain = name == "paligemma" or why_plain(model) is not None
    wanted = (2 + 2 + (2 if plain else 1)) * images  # by two completions of each, or once where shared
    assert cache.metrics() == {"vision/computed_per_image": images / wanted}


@pytest.mark.parametrize("name", ["idefics3", "llama4", "qwen3"])
def test_other_families_are_left_alone(name):
    base = base_of(build(KNOWN[name]))
    assert why_not_once(base) == f"not tested with models of the type {base.config.model_type}"


ZERO = [{"deepspeed_plugin": SimpleNamespace(zero_stage=stage)} for stage in range(4)]
ONCE, TRAINS = "once per rollout", "in every pass (the vision tower trains)"


def plan(model, *, backend="NO", megabytes=64, images=True, fsdp=False, deepspeed_plugin=None):
    """Where the features are computed in a run that is launched so."""
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=backend)))
    trainer = SimpleNamespace(
        args=SimpleNamespace(vision_cache_megabytes=megabytes, deepspeed_plugin=deepspeed_plugin),
        model=model,
        accelerator=SimpleNamespace(state=state),
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=deepspeed_plugin is not None,
    )
    return str(plan_vision(trainer, images)).removeprefix(f"vision_cache_megabytes={megabytes}: image features ")


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({}, ONCE),
        (ZERO[2], ONCE),
        ({"megabytes": 0}, "in every pass (switched off)"),
        ({"images": False}, "in every pass (data without images)"),
        ({"backend": "INDUCTOR"}, "in every pass (torch.compile)"),
        (
            {"fsdp": True},
            "in every pass (sharded parameters",
        ),
        (ZERO[3], "in every pass (sharded parameters"),
    ],
)
def test_launches(launch, expected):
    adapted = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert plan(adapted, **launch).startswith(expected)


@pytest.mark.parametrize("target", [["qkv"], r".*merger\.mlp\.0"])
def test_adapters_in_tower_or_merger_train_it(target):
    model = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=target))
    assert plan(model) == TRAINS
    for parameter in model.parameters():  # the reference is the model without them, or with others
        parameter.requires_grad_(False)
    assert plan(model) == "in every pass (adapters in the vision tower, which the reference may leave out)"


def test_parameters_and_dropout_of_the_tower():
    newline = build("llava_next")
    for name, parameter in newline.named_parameters():
        parameter.requires_grad_("image_newline" in name)
    assert plan(newline) == TRAINS
    model = with_frozen_tower(build("gemma3"))
    assert plan(model) == ONCE
    for module in model.model.vision_tower.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.1
    assert plan(model) == "in every pass (dropout in the vision tower)"
