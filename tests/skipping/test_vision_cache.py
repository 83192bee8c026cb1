"""What image features are recognised by, when they are dropped, and how many are kept."""

import copy

import pytest
import torch
from support.models.families import build, make_batch, with_frozen_tower

from vgr_trl import DAPOConfig
from vgr_trl.efficiency.vision_cache import VisionCache, parameters_of_tower
from vgr_trl.sharing.model_support import base_of
from vgr_trl.utils import ConfigError

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


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_the_option_is_checked(value, tmp_path):
    with pytest.raises(ConfigError, match="vision_cache_megabytes is .*: give an integer of at least 0"):
        DAPOConfig(str(tmp_path), vision_cache_megabytes=value, use_cpu=True, bf16=False)
