import math

import pytest
import torch

from vgr_trl.config import MeasureOptions
from vgr_trl.errors import ConfigError
from vgr_trl.signals import AttentionMass, named
from vgr_trl.signals.ratios import measure_segments

NAN, INF = math.nan, math.inf

# Of 16 vision and 4 instruction tokens: VGR, both indices and the balance for R = 2, from A_V and A_I by hand.
TWICE = [2, 5 / 6, 5 / 3, 0, 0.4, 0.2]  # definitions.md
EVEN = [1, 1, 1, 1, 0.4, 0.1]  # 0.1 / 4 against 0.4 / 16
HALF = [0.5, 10 / 9, 5 / 9, 0, 0.8, 0.1]  # 8/9 of the attention over 4/5 of the tokens, 1/9 over 1/5
ALL = [1, 1, 1, 1, 1.6 / 3, 0.4 / 3]  # of the three together: 0.4 / 4 against 1.6 / 16
NO_IMAGE = [NAN, NAN, NAN, NAN, 0.0, 0.6]


def mass(num_layers=3):
    """A completion of two tokens about an image, and one of a single token about none, in the layers above."""
    per_token = torch.tensor([-0.05, 0.05])  # its mean is 0
    vision = torch.tensor([0.4, 0.4, 0.8])[:num_layers, None] + per_token  # (L, T)
    instruction = torch.tensor([0.2, 0.1, 0.1])[:num_layers, None] - per_token
    return AttentionMass(
        vision=torch.stack([vision, torch.zeros_like(vision)], dim=1),
        instruction=torch.stack([instruction, torch.tensor([0.6, 0.9]).expand_as(instruction)], dim=1),
        num_vision=torch.tensor([16, 0]), num_instruction=torch.tensor([4, 4]),
        mask=torch.tensor([[True, True], [True, False]]),
    )  # fmt: skip


def table(**segments):
    return {name: torch.tensor(rows, dtype=torch.float32) for name, rows in segments.items()}


def test_three_layers():
    found = measure_segments(mass(), "thirds", 2.0)
    assert list(found) == ["early", "middle", "late", "all"]
    for name, expected in {"early": TWICE, "middle": EVEN, "late": HALF, "all": ALL}.items():
        assert found[name].shape == (2, 6)
        assert found[name][0].tolist() == pytest.approx(expected, abs=1e-6)
        assert found[name][1].tolist() == pytest.approx(NO_IMAGE, nan_ok=True)
    # Of 3 layers the last two: A_V = 0.6, A_I = 0.1, so 0.025 / 0.0375; 1 - ln 2 / ln 4.
    assert measure_segments(mass(), "ends", 2.0)["late"][0, 0].item() == pytest.approx(2 / 3)
    assert measure_segments(mass(), "thirds", 4.0)["early"][0, 3].item() == pytest.approx(0.5)
    assert list(measure_segments(mass(num_layers=2), "thirds", 2.0)) == ["all"]
    with pytest.raises(ConfigError):
        measure_segments(mass(), "thirds", 1.0)


def test_late_segment_for_rewards_and_every_one_in_the_table():
    columns = named.reward_columns(table(late=[HALF, NO_IMAGE], all=[TWICE, NO_IMAGE]))
    assert columns["vgr"] == [0.5, None]
    assert columns["aei_vision"] == [pytest.approx(10 / 9), None]
    assert columns["aei_instruction"] == [pytest.approx(5 / 9), None]
    first, second = columns["attention_metrics"]
    assert list(first) == ["late", "all"]
    assert first["all"] == pytest.approx(dict(zip(named.ATTENTION_QUANTITIES, TWICE, strict=True)))
    assert named.reward_columns(table(all=[[INF, 0, 5, 0, 0, 0.2]]))["vgr"] == [INF]
    assert list(second["late"].values()) == [None] * 4 + [0.0, pytest.approx(0.6)]


def test_the_share_of_a_region_by_hand_and_through_a_buffer():
    """Two layers: 0.1 and 0.3 of 0.4 and 0.4 on the image are a half; 2 of 8 tokens make that twice the average."""
    half = torch.full((2, 2, 1), 0.4)
    region = torch.tensor([[[0.1], [0.0]], [[0.3], [0.0]]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    counts = torch.tensor([8, 8])
    mass = AttentionMass(half, half, counts, counts, mask, region, torch.tensor([2, 0]))
    signals = named.RolloutSignals(torch.zeros(2, 1), torch.zeros(2, 1), mask, mass)
    signals = named.columns_to_signals(named.signals_to_columns(signals))
    names = named.add_named(named.named_signals(MeasureOptions(signals=["region_focus"])), signals)
    assert names == ["region_share", "region_focus"]
    assert signals.extra["region_share"][0].item() == pytest.approx(0.5)
    assert signals.extra["region_focus"][0].item() == pytest.approx(2)
    assert signals.extra["region_share"][1].isnan(), "no box"
    again = named.columns_to_signals(named.signals_to_columns(signals))
    assert again.extra["region_focus"].nan_to_num().tolist() == signals.extra["region_focus"].nan_to_num().tolist()
