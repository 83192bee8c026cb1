import math
from types import SimpleNamespace

import pytest
import torch
from support.models.families import IMAGE, VIDEO, build

from vgr_trl.demo.tiny_model import SPECIAL_TOKENS, TAGS, build_processor
from vgr_trl.errors import ConfigError
from vgr_trl.signals import ratios
from vgr_trl.signals.ratios import special_token_ids, vision_token_ids, visual_dependency

NAN, INF = math.nan, math.inf
LN2 = math.log(2)


def test_masks_by_hand():
    """Padding, <start>, image, image, <end>, two words, a video, a word; the second row is padded on the right."""
    ids = torch.tensor([[0, 7, 2, 2, 7, 20, 21, 5, 22], [2, 20, 21, 7, 22, 5, 0, 2, 20]])
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
    masks = ratios.build_modality_masks(ids, attention_mask, vision_token_ids=[2, 5], special_token_ids=[0, 7])
    assert masks.vision.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0, 0, 0]]
    assert masks.instruction.int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0, 0, 0, 0]]
    placeholder = ratios.build_modality_masks(ids[:1], ids[:1] > 0, vision_token_ids=[2], special_token_ids=[2, 0])
    assert placeholder.vision.sum() == 2, "a special token of most tokenizers"


def test_what_a_processor_knows():
    assert set(vision_token_ids(build("qwen2_5_vl"))) == {IMAGE, VIDEO}
    assert set(vision_token_ids(build("llava").config)) == {IMAGE}
    processor = build_processor(["what colour is this"])
    processor.video_token = "<|video_pad|>"  # as that of Qwen-VL has
    ids = processor.tokenizer.convert_tokens_to_ids
    config = SimpleNamespace()  # a model that says nothing
    assert set(vision_token_ids(config, processor)) == {ids("<|image_pad|>"), ids("<|video_pad|>")}
    special = special_token_ids(processor)
    assert set(special) == set(special_token_ids(processor.tokenizer)) == {ids(token) for token in SPECIAL_TOKENS}
    assert not {ids(tag) for tag in TAGS} & set(special), "tags of the answer are text"


def mass(vision, instruction, num_vision=16, num_instruction=4, mask=None):
    vision, instruction = (torch.tensor(side, dtype=torch.float32).unsqueeze(1) for side in (vision, instruction))
    mask = torch.ones(1, vision.size(2), dtype=torch.bool) if mask is None else torch.tensor([mask], dtype=torch.bool)
    return ratios.AttentionMass(vision, instruction, torch.tensor([num_vision]), torch.tensor([num_instruction]), mask)


def test_segments_of_layers():
    for count, sizes in ((3, (1, 1, 1)), (5, (2, 2, 1)), (28, (10, 9, 9))):
        thirds = ratios.split_layers(count)
        assert tuple(len(thirds[name]) for name in ("early", "middle", "late")) == sizes
        assert thirds["early"] + thirds["middle"] + thirds["late"] == thirds["all"] == list(range(count))
    for count, middle in ((4, [1, 2]), (28, [13, 14])):
        expected = {"early": [0, 1], "middle": middle, "late": [count - 2, count - 1], "all": [*range(count)]}
        assert ratios.split_layers(count, "ends") == expected


def test_average_first_then_take_the_ratio():
    """A_I = 0.3, A_V = (0.1 + 0.7) / 2 = 0.4: 0.075 / 0.025 = 3; the ratios of the two tokens are 12 and 12 / 7."""
    one = mass([[0.1, 0.7]], [[0.3, 0.3]])
    assert ratios.vision_gain_ratio(one).tolist() == pytest.approx([3])
    assert ratios.token_vision_gain_ratio(one).tolist() == [pytest.approx([12, 12 / 7])]


def test_tokens_that_see_different_images_by_hand():
    """The worked case of turns in docs/definitions.md; a tool's token in the middle, and one that sees no image."""
    one = mass([[0.2, 0.2, 0.9, 0.4, 0.4, 0.0]], [[0.3, 0.3, 0.9, 0.4, 0.4, 0.9]])
    one.mask = torch.tensor([[True, True, False, True, True, True]])
    one.seen_vision, one.seen_instruction = torch.tensor([[4, 4, 4, 16, 16, 0]]), torch.tensor([[6, 6, 6, 8, 8, 8]])
    assert ratios.vision_gain_ratio(one).tolist() == pytest.approx([4 / 3])
    assert ratios.token_vision_gain_ratio(one).tolist() == [pytest.approx([1, 1, NAN, 2, 2, NAN], nan_ok=True)]
    aei = [value.item() for value in ratios.attention_efficiency_index(one)]
    assert aei == pytest.approx([51 / 58, 34 / 29])
    share = 7 / 17
    assert aei[1] == pytest.approx(4 / 3 / (4 / 3 * share + 1 - share))


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (mass([[0.0]], [[0.9]], num_vision=0), NAN), (mass([[0.9]], [[0.0]], num_instruction=0), NAN),
        (mass([[0.4]], [[0.2]], mask=[False]), NAN), (mass([[0.0]], [[0.0]]), NAN), (mass([[0.0]], [[0.2]]), INF),
        (mass([[0.4]], [[0.0]]), 0.0),
    ],
)  # fmt: skip
def test_undefined_ratios(one, expected):
    ratio = ratios.vision_gain_ratio(one)
    assert ratio.tolist() == pytest.approx([expected], nan_ok=True)
    assert ratios.token_vision_gain_ratio(one).flatten().tolist() == pytest.approx([expected], nan_ok=True)
    indices = torch.cat(ratios.attention_efficiency_index(one))
    assert bool(indices.isnan().all()) == math.isnan(expected)
    assert ratios.mdi_balance(ratio).tolist() == pytest.approx([NAN if math.isnan(expected) else 0], nan_ok=True)


def test_balance_at_its_ends():
    assert ratios.mdi_balance(torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1, 0.0, INF])).tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert ratios.mdi_balance(torch.tensor([[2.0]]), 4.0).tolist() == [[pytest.approx(0.5)]]
    with pytest.raises(ConfigError):
        ratios.mdi_balance(torch.tensor([1.0]), 1)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (0.0, 0.0),
        (LN2, 2 - LN2 - 1),  # the token is twice as likely without the image
        (-LN2, 0.5 + LN2 - 1),  # half as likely
        (3.0, 10.0),  # e^3 - 4 = 16.1
        (-30.0, 10.0),  # clamped to -20 first: 20 + e^-20 - 1 = 19, then to 10
        (-math.inf, 10.0),
    ],
)
def test_values_by_hand(difference, expected):
    original = torch.tensor([[-1.5]])
    assert visual_dependency(original, original + difference).item() == pytest.approx(expected, abs=2e-6)


def test_gradients_flow_into_both_and_stop_where_it_is_clamped():
    """d/dx of e^(p - x) - (p - x) - 1 is 1 - e^(p - x)."""
    original = torch.tensor([[-1.0, -1.0, -9.0]], requires_grad=True)
    perturbed = torch.tensor([[-1.0 - LN2, -1.0, 0.0]], requires_grad=True)
    visual_dependency(original, perturbed).sum().backward()
    assert original.grad.tolist()[0] == pytest.approx([0.5, 0.0, 0.0], abs=1e-6)
    assert perturbed.grad.tolist()[0] == pytest.approx([-0.5, 0.0, 0.0], abs=1e-6)
