"""What is kept while a rollout batch is made: where attention is measured, and how it fits the batch."""

import pytest
import torch
from support.models.eager_reference import SPECIAL_IDS, VISION_IDS, difference
from support.models.families import CLOSE, EOS, IMAGE, OPEN, VIDEO, build, make_batch

from vgr_trl.measure import _limit_kept_rows, make_signals
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import GenerationProbe
from vgr_trl.signals.scoring import AttentionPlan, Want, score


@pytest.mark.parametrize("longer", [3, -2])
def test_attention_measured_in_generation(longer):
    """The same as by scoring; columns that padding adds do not count, columns that are cut off are gone."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    prompts = batch.prompt_inputs()
    sampling = {"do_sample": True, "max_new_tokens": 8, "suppress_tokens": [IMAGE, VIDEO, OPEN, CLOSE, EOS]}
    torch.manual_seed(0)
    with share_prompts(model):
        tokens = model.generate(**prompts, **sampling)
    torch.manual_seed(0)
    generating = GenerationProbe(model, vision_token_ids=VISION_IDS, special_token_ids=SPECIAL_IDS)
    with share_prompts(model), generating as probe:
        assert torch.equal(model.generate(**prompts, **sampling), tokens)
    length = 8 + longer
    prompt = prompts["input_ids"].size(1)
    ids = torch.nn.functional.pad(tokens, (0, max(longer, 0)))[:, : prompt + length]
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, min(length, 8)), value=1)
    mask = torch.nn.functional.pad(mask, (0, max(longer, 0)))
    inputs = {**prompts, "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    plan = AttentionPlan(VISION_IDS, SPECIAL_IDS)
    scores = score(model, inputs | {"logits_to_keep": length}, Want(entropies=True, attention=plan))
    found = make_signals(scores, probe.mass).attention
    expected = make_signals(scores, None).attention
    assert found.vision.shape == expected.vision.shape == (2, 6, length)
    assert torch.equal(found.mask, expected.mask)
    assert difference(found.vision, expected.vision, found.mask) < 1e-5
    assert difference(found.instruction, expected.instruction, found.mask) < 1e-5
    assert probe.mass.vision.size(2) == 8


def test_maps_are_kept_of_as_many_rows_as_fit(monkeypatch):
    """2 layers, 12 tokens, vision tokens as the rows have them, 4 bytes each; a smaller row behind a large one fits."""
    vision = torch.zeros(4, 40, dtype=torch.bool)
    for row, tokens in enumerate((16, 32, 16, 8)):
        vision[row, :tokens] = True
    rows = (0, 1, 2, 3)
    one = 4 * 2 * 12 * 16
    for most, kept in ((one - 1, [3]), (one, [0]), (2 * one - 1, [0, 3]), (2 * one, [0, 2]), (3 * one, [0, 1])):
        monkeypatch.setattr("vgr_trl.measure.MOST_KEPT", most)
        assert _limit_kept_rows(vision, 2 * 12, rows) == kept
    assert _limit_kept_rows(vision, 2 * 12, ()) == []
