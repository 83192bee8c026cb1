import pytest
import torch
from support.models.families import FAMILIES, build
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.data.images import boxes_of
from vgr_trl.errors import DataError
from vgr_trl.views.regions import select_region, token_shares

WITH_PIXELS = ["qwen2_5_vl", "gemma3", "internvl", "idefics3"]


def features(model, given):
    found = model.get_image_features(**given, return_dict=True).pooler_output
    return torch.cat(list(found)) if isinstance(found, (list, tuple)) else found.flatten(0, -2)


def made_local(model):
    for name, layer in model.named_modules():
        if "vis" in name and isinstance(layer, GradientCheckpointingLayer):
            layer.forward = lambda hidden, *args, **kwargs: hidden
    return model


@pytest.mark.parametrize("name", WITH_PIXELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_tokens_that_change_with_the_pixels_of_a_model_are_those_of_the_map(name, seed):
    """A few pixels are changed; the features that differ are those whose tokens the map says have a part in them."""
    model, picture = made_local(build(name)), FAMILIES[name].picture(seed)
    given = dict(picture.inputs)
    tokens = sum(token == 2 for token in picture.tokens)
    changed = torch.zeros_like(given["pixel_values"])
    if "image_grid_thw" in given:
        changed[5] = 1
    else:
        changed[..., 5:7, 9:10] = 1
        squares = changed.view(-1, *changed.shape[-3:])
        squares[1:].zero_() if seed == 0 else squares[:1].zero_()
        changed = changed if changed.any() else torch.ones_like(changed) * (torch.arange(changed.size(-1)) == 3)
    with torch.no_grad():
        before = features(model, given)
        after = features(model, given | {"pixel_values": given["pixel_values"] + 3 * changed})
    moved = (before - after).abs().amax(-1) > 1e-5
    shares = token_shares(changed, given, tokens)
    assert moved.any()
    assert not moved.all()
    assert torch.equal(shares > 0, moved)


def test_pixels_that_no_one_knows_the_tokens_of():
    with pytest.raises(DataError):
        token_shares(torch.ones(1, 3, 16, 16), {"pixel_values": torch.ones(1, 3, 16, 16)}, 7)
    tiles = {"pixel_values": torch.ones(1, 3, 3, 16, 16), "image_sizes": torch.tensor([[32, 16]])}
    with pytest.raises(DataError):  # LLaVA-NeXT, also where 3 tiles of 4 x 4 would fit
        token_shares(tiles["pixel_values"], tiles, 48)


def test_at_least_half_of_a_token_or_the_one_with_most():
    assert select_region(torch.tensor([0.5, 0.49, 1.0, 0.0])).tolist() == [True, False, True, False]
    assert select_region(torch.tensor([0.1, 0.3, 0.3])).tolist() == [False, True, True]
    assert select_region(torch.zeros(3)).tolist() == [False] * 3


def test_one_box_in_pixels_says_that_all_are():
    boxes = boxes_of({"regions": [[0.1, 0.1, 0.3, 0.2], [10, 5, 30, 10]]}, (100, 50))
    assert boxes == [pytest.approx((0.001, 0.002, 0.004, 0.006)), pytest.approx((0.1, 0.1, 0.4, 0.3))]
    with pytest.raises(DataError):
        boxes_of({"bbox": [0.5, 0, 0.4, 1]}, (100, 50))
