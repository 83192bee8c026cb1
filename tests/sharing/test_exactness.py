"""Models whose results depend on the columns of a token are found by running them, whatever they are called."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models.compare import plain_and_shared, with_head
from support.models.families import BODY, FAMILIES, OTHERS, PAD, Family, build, make_batch, text_model

from vgr_trl.sharing import why_not_share
from vgr_trl.sharing.model_support import base_of, causal_model

SAME = 1e-6
RESTARTS = "a row of prompts and completions changes its hidden states"
ENCODERS = {**BODY, "is_decoder": True, "pad_token_id": PAD}
FROM_IDS = ["Roberta", "Camembert", "XLMRoberta", "Data2VecText"]  # which skip the padding that they see, and no other


def decoder(kind):
    options = {name: ENCODERS[name] for name in ENCODERS if not name.startswith(("num_key", "head", "bos"))}
    return Family(kind, text_model(kind, **options))


@pytest.mark.parametrize("kind", [*FROM_IDS, "jamba"])  # Jamba's state forgets the prompt before several tokens
def test_a_prompt_that_completions_do_not_go_on_from(kind):
    family = OTHERS.get(kind) or decoder(kind)
    model, batch = with_head(build(family)), make_batch(family)
    plain, shared, report = plain_and_shared(model, batch)
    (reason,) = report.plain
    assert reason.startswith(RESTARTS)
    assert reason == why_not_share(model)
    assert (plain - shared).abs().max() < SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FAMILIES, "gemma3n", "lfm2_vl", "qwen3_next", "qwen3_5_moe"])
def test_other_models_stay_as_they_were(name, dtype):
    """Dropout is off meanwhile, which would differ from pass to pass."""
    family = FAMILIES.get(name) or OTHERS[name]
    lora = LoraConfig(r=2, lora_dropout=0.5, init_lora_weights=False, target_modules=family.lora)
    model = get_peft_model(build(family).to(dtype), lora)
    base = base_of(causal_model(model.train()))
    base.rope_deltas = before = object()
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    assert why_not_share(model) is None
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert base.rope_deltas is before


def test_a_model_that_cannot_read_two_rows_of_text_runs_plainly(monkeypatch):
    model, batch = with_head(build("llama")), make_batch("llama")

    def refuse(input_ids, **inputs):
        raise ValueError("an image, please")

    with monkeypatch.context() as only_images:
        only_images.setattr(model.model, "forward", refuse)
        assert why_not_share(model) == "its pass over two short rows fails: an image, please"
    plain, shared, report = plain_and_shared(model, batch)
    assert report.plain == {"its pass over two short rows fails: an image, please": 1}
    assert torch.equal(plain, shared)
