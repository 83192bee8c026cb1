from contextlib import nullcontext

import pytest
import torch
from support.models.compare import checkpointed, gradients, largest_relative, needs_shared, plain_and_shared, with_head
from support.models.families import IMAGE, build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals.probe import AttentionProbe, SimilarityProbe
from vgr_trl.signals.ratios import ModalityMasks

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
CASES = [(name, (1, 1), False) for name in FAMILIES]
CASES += [("qwen2_5_vl", images, False) for images in ((2, 0), (0, 0))] + [("qwen2_5_vl", (1, 1), True)]
REFUSED = [("qwen3_5", None), ("qwen2_5_vl", "mm_token_type_ids"), ("llava", None)]


@pytest.mark.parametrize(("name", "images", "checkpointing"), CASES)
def test_scores_and_gradients_are_those_of_plain_passes(name, images, checkpointing):
    model, batch = with_head(build(name)), make_batch(name, images=images, returned=(0, 1, 2))
    needs_shared(model)
    plain, shared, report = plain_and_shared(model, batch, batch.completion_length)
    assert (report.prompts, report.rows, dict(report.plain)) == (2, 6, {})
    assert (plain - shared).abs().max() < 3e-5
    expected = gradients(model, batch)
    if checkpointing:
        checkpointed(model.train(), {"use_reentrant": False})
    with share_prompts(model, batch.completion_length) as report:
        found = gradients(model, batch)
    assert report.prompts_per_row < 1
    assert largest_relative(expected, found) < 2e-4


@pytest.mark.parametrize("over", ["max", "mean", "centre"])
def test_signals_are_those_of_plain_passes(over):
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl", returned=(0, 1, 2))
    ids, mask, length = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), batch.completion_length
    prompt = ids.size(1) - length
    vision = ids == IMAGE
    text = mask & ~vision & (torch.arange(ids.size(1)) < prompt)
    found = []
    for shares in (False, True):
        masks = ModalityMasks(vision, text, images=vision.unsqueeze(-1) & (vision.cumsum(1) > 4).unsqueeze(-1))
        probe = AttentionProbe(model, masks, keep_rows=(2, 4), prompt=prompt, measure_prompt=True)
        similar = SimilarityProbe(model, vision, over=over, prompt=prompt)
        with share_prompts(model, length) if shares else nullcontext() as report, torch.no_grad(), probe, similar:
            model(**batch.inputs)
        found.append((probe.mass, probe.prompt_mass, probe.image_mass, probe.kept, similar.similarity))
    assert report.prompts_per_row < 1
    (mass, prompts, image, kept, similarity), (shared, also, images, maps, similarities) = found
    valid = mask[:, prompt:]
    assert (mass.vision - shared.vision)[:, valid].abs().max() < 1e-6
    assert (prompts.vision - also.vision).abs().max() < 1e-6
    assert (image - images)[:, valid].abs().max() < 1e-6 < image.max()
    assert all((kept[row] - maps[row])[:, valid[row]].abs().max() < 1e-6 for row in (2, 4))
    assert torch.allclose(similarity[valid], similarities[valid], atol=1e-5)


@pytest.mark.parametrize(("name", "missing"), REFUSED)
def test_other_families_pass_plainly(name, missing):
    model, batch = build(name), make_batch(name, returned=(0, 1, 2))
    needs_shared(model)
    batch.inputs.pop(missing, None)
    with torch.no_grad(), share_prompts(model, batch.completion_length) as report:
        model(**batch.inputs)
    assert dict(report.plain) == {"images in completions": 1}
