"""Models whose head goes around the base model, which therefore sees no batch."""

import pytest
import torch
from support.models.compare import scored, with_head
from support.models.families import Family, build, make_batch, text_model
from torch.nn.functional import pad

from vgr_trl.sharing import share_prompts

OPT = Family("opt", text_model("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0))
REASON = "a head that does not call its base model"


@pytest.mark.parametrize("completion_length", [None, 12])
def test_are_reported(completion_length):
    model, batch = build(OPT), make_batch(OPT)
    with torch.no_grad():
        plain = model(**batch.inputs).logits
        with share_prompts(model, completion_length) as report:
            shared = model(**batch.inputs).logits
            model(batch.inputs["input_ids"][:2])
    assert torch.equal(plain, shared)
    assert (report.plain, report.rows, report.prompts) == ({REASON: 2}, 8, 8)


def test_the_head_of_trl_calls_the_base_model():
    model, batch = with_head(build(OPT)), make_batch(OPT)
    with torch.no_grad():
        plain, _ = scored(model, batch)
        with share_prompts(model, 12) as report:
            shared, _ = scored(model, batch)
    mask = batch.inputs["attention_mask"][:, -12:].bool()
    assert (plain - shared)[mask].abs().max() < 1e-5
    assert (dict(report.plain), report.rows, report.prompts) == ({}, 6, 2)


@pytest.mark.parametrize("family", [OPT, "llama"])
def test_generation_makes_its_own_arrangements(family):
    model, batch = build(family), make_batch(family)
    inputs = batch.prompt_inputs()
    with share_prompts(model) as report:
        shared = model.generate(**inputs, do_sample=False, max_new_tokens=4)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=4)
    width = max(plain.size(1), shared.size(1))
    assert torch.equal(*(pad(one, (0, width - one.size(1))) for one in (plain, shared)))
    assert (dict(report.plain), report.rows, report.prompts) == ({}, 6, 2)
