"""TRL's fused head sees the columns that emit completions, and gives what it gives otherwise."""

import pytest
import torch
from support.models.compare import needs_shared
from support.models.families import FAMILIES, build, make_batch
from trl.trainer.utils import add_fused_lm_head

from vgr_trl.sharing import share_prompts


def scored(model, batch):
    labels = batch.inputs["input_ids"].masked_fill(batch.inputs["attention_mask"] == 0, -100)
    labels[:, : -batch.completion_length] = -100
    return model(**batch.inputs, labels=labels, fused_lm_head=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_the_same(name):
    model, batch = build(name), make_batch(name)
    needs_shared(model)
    length = batch.completion_length
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    plain = scored(model, batch)
    plain.loss.backward()
    expected = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    with share_prompts(model, length) as report:
        shared = scored(model, batch)
        shared.loss.backward()
    assert report.prompts_per_row < 1
    assert shared.log_probs.shape == shared.entropy.shape == (len(batch.inputs["input_ids"]), length)
    for found, wanted in ((shared.log_probs, plain.log_probs), (shared.entropy, plain.entropy)):
        assert (found - wanted[:, -length:]).abs().max() < 3e-5
    assert shared.loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)
    for key, value in model.named_parameters():
        if value.grad is not None:
            assert (value.grad - expected[key]).abs().max() <= 2e-4 * expected[key].abs().max() + 1e-7, key


def test_other_calls_are_as_they_were():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    before = model.forward
    with torch.no_grad():
        plain = model(**batch.inputs).logits
        with share_prompts(model, batch.completion_length):
            assert model.forward != before
            shared = model(**batch.inputs).logits
            with_loss = model(**batch.inputs, labels=batch.inputs["input_ids"])
    assert shared.shape == plain.shape == with_loss.logits.shape
    assert with_loss.loss is not None
    assert model.forward == before
