"""What image features are recognised by, when they are given up, and how many are kept."""

import pytest
import torch
from support.models.families import build, make_batch

from vgr_trl.errors import ConfigError
from vgr_trl.sharing.backbone import base_of
from vgr_trl.skipping import VisionOnce, VisionPlan
from vgr_trl.skipping.vision_features import ImageFeatures
from vgr_trl.skipping.vision_images import Fingerprints
from vgr_trl.skipping.vision_store import FeatureStore
from vgr_trl.skipping.vision_tower import Towers, parameters_of_tower

IMAGES, TOKENS, WIDTH = 3, 4, 32  # of a batch of `frozen_llava`; features of one image are TOKENS * WIDTH float32


def frozen(name):
    model = build(name)
    for parameter in parameters_of_tower(base_of(model)):
        parameter.requires_grad_(False)
    return model


def computed(once, model, batch):
    """Images whose features a pass of the model has computed."""
    once.metrics()
    with once.around(model), torch.no_grad():
        model(**batch.inputs)
    found = once.metrics()
    return round(found["vision/computed_per_image"] * len(batch.inputs["pixel_values"])) if found else None


@pytest.fixture(scope="module")
def batch():
    return make_batch("gemma3", images=(1, 2), generations=1)


def test_features_beyond_the_limit_are_computed_again(batch):
    """Room for two of three images; the third is computed in every pass, and drives none of the others out."""
    model = frozen("gemma3")
    once = VisionOnce(VisionPlan(1, None))
    once._store.limit = 2 * TOKENS * WIDTH * 4
    assert [computed(once, model, batch) for _ in range(3)] == [3, 1, 1]


def test_a_rollout_begins_without_features_of_the_last(batch):
    model = frozen("gemma3")
    once = VisionOnce(VisionPlan(64, None))
    with once.rollout(trains=True):
        assert computed(once, model, batch) == 3
        with once.rollout(trains=True):  # a further round
            assert computed(once, model, batch) == 0
    assert computed(once, model, batch) == 0
    with once.rollout(trains=False):
        assert computed(once, model, batch) == 3
    assert computed(once, model, batch) == 3


def test_features_of_replayed_rows_last_while_they_are_wanted(batch):
    other = make_batch("gemma3", images=(1, 1), generations=1, seed=5)
    model = frozen("gemma3")
    once = VisionOnce(VisionPlan(64, None, lasts=True))
    wanted = [
        (batch, 3),
        (batch, 0),
        (other, 2),
        (batch, 3),
    ]  # images computed; of `batch` none was wanted the time before
    for rows, expected in wanted:
        with once.rollout(trains=True):
            assert computed(once, model, rows) == expected


def test_written_weights_and_other_precision_are_another_tower(batch):
    model = frozen("gemma3")
    once = VisionOnce(VisionPlan(64, None))
    assert computed(once, model, batch) == 3
    model.load_state_dict(model.state_dict())
    assert computed(once, model, batch) == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert computed(once, model, batch) == 3
    assert computed(once, model, batch) == 0


def test_a_tower_that_trains_is_left_alone_outside_of_rollouts(batch):
    model = build("gemma3")
    once = VisionOnce(VisionPlan(64, None, trains=True))
    assert computed(once, model, batch) is None
    with once.rollout(trains=True):
        assert computed(once, model, batch) == 3
        assert computed(once, model, batch) == 0


def test_a_copy_has_the_number_of_its_original_until_one_changes():
    towers, models = Towers(), [build("gemma3"), build("gemma3"), build("gemma3", seed=1)]
    bases = [base_of(model) for model in models]
    assert [towers.number(base) for base in bases] == [0, 0, 1]
    with torch.no_grad():
        next(parameters_of_tower(bases[0])).mul_(1.0)
    assert [towers.number(base) for base in bases] == [0, 0, 1]  # written to, and still equal to its copy
    with torch.no_grad():
        next(parameters_of_tower(bases[0])).mul_(2.0)
    assert [towers.number(base) for base in bases] == [2, 0, 1]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_fingerprints_tell_pixels_apart(kind):
    image = torch.arange(24).reshape(4, 6).to(kind)
    changed = [image.clone() for _ in range(4)]
    changed[1][3, 5] += 1
    changed[2][[0, 1]] = changed[2][[1, 0]]  # rows exchanged
    changed[3] = changed[3].reshape(2, 12)
    of = Fingerprints().of([image, *changed])
    assert of[0] == of[1]
    assert len(set(of)) == 4


def test_signs_of_two_pixels_are_part_of_a_fingerprint():
    """The highest bits: what changes by half of 2 ** 64 twice would vanish from a sum of 64-bit numbers."""
    image = torch.ones(1, 8)
    changed = image * torch.tensor([-1.0, -1, 1, 1, 1, 1, 1, 1])
    assert len(set(Fingerprints().of([image, changed]))) == 2


def test_the_store_counts_bytes():
    store, features = FeatureStore(100), ImageFeatures(torch.zeros(2, 4), (torch.zeros(2, 4),))  # 32 bytes each
    store.put("a", features)
    store.put("b", features)
    assert (store.used, store.get("a"), store.get("b")) == (64, features, None)
    store.drop_unwanted()
    store.drop_unwanted()
    assert (store.used, store.get("a")) == (0, None)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_the_option_is_checked(value, tmp_path):
    from vgr_trl import DAPOConfig

    with pytest.raises(ConfigError, match="vision_cache_megabytes is .*: give an integer of at least 0"):
        DAPOConfig(str(tmp_path), vision_cache_megabytes=value, use_cpu=True, bf16=False)
