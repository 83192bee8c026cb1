"""A third set of keys in the probe: the same as the attention kept token by token, summed."""

import pytest
import torch
from support.models.eager_reference import SPECIAL_IDS, VISION_IDS
from support.models.families import build, make_batch

from vgr_trl.batch import AttentionMass, RolloutSignals, columns_of_signals, signals_of_columns
from vgr_trl.config import MeasureOptions
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, build_modality_masks
from vgr_trl.signals.named import add_named, named_signals


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava_next", "idefics3"])
def test_attention_on_a_region(name, shared):
    model, batch = build(name), make_batch(name)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    prompts = slice(0, ids.size(1) - batch.completion_length)
    masks = build_modality_masks(
        ids[:, prompts], mask[:, prompts], vision_token_ids=VISION_IDS, special_token_ids=SPECIAL_IDS
    )
    masks.region = masks.vision & (masks.vision.cumsum(1) % 3 == 1)  # the first of three, the fourth, …
    with torch.no_grad(), AttentionProbe(model, masks, keep_rows=range(len(ids))) as probe:
        if shared:
            with share_prompts(model, batch.completion_length):
                model(**batch.inputs)
        else:
            model(**batch.inputs)
    mass = probe.mass
    assert torch.equal(mass.num_region, masks.region.sum(1))
    for row in range(len(ids)):
        own = masks.region[row, masks.vision[row]]
        assert torch.allclose(mass.region[:, row], probe.kept[row][..., own].sum(-1), atol=1e-6)
        assert torch.allclose(mass.vision[:, row], probe.kept[row].sum(-1), atol=1e-6)


def test_the_share_of_a_region_by_hand_and_through_a_buffer():
    """Two layers: 0.1 and 0.3 of 0.4 and 0.4 on the image are a half; 2 of 8 tokens make that twice the average."""
    half = torch.full((2, 2, 1), 0.4)
    region = torch.tensor([[[0.1], [0.0]], [[0.3], [0.0]]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    counts = torch.tensor([8, 8])
    mass = AttentionMass(half, half, counts, counts, mask, region, torch.tensor([2, 0]))
    signals = RolloutSignals(torch.zeros(2, 1), torch.zeros(2, 1), mask, mass)
    signals = signals_of_columns(columns_of_signals(signals))
    assert add_named(named_signals(MeasureOptions(signals=["region_focus"])), signals) == [
        "region_share",
        "region_focus",
    ]
    assert signals.extra["region_share"][0].item() == pytest.approx(0.5)
    assert signals.extra["region_focus"][0].item() == pytest.approx(2)
    assert signals.extra["region_share"][1].isnan(), "no box"
    again = signals_of_columns(columns_of_signals(signals))
    assert again.extra["region_focus"].nan_to_num().tolist() == signals.extra["region_focus"].nan_to_num().tolist()
