"""Models whose results depend on the columns of a token are found by running them, whatever they are called."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models.compare import plain_and_shared, with_head
from support.models.decoders import DECODERS
from support.models.families import BODY, FAMILIES, OTHERS, PAD, Family, build, make_batch, text_model
from support.models.flash_on_cpu import as_flash

from vgr_trl.sharing import why_not_share
from vgr_trl.sharing.exactness import why_padding_counts
from vgr_trl.sharing.model_support import base_of, causal_model

SAME = 1e-6
COUNTS = "padding around a prompt changes its hidden states"
RESTARTS = "a prompt computed before its completion changes its hidden states"
ENCODERS = {**BODY, "is_decoder": True, "pad_token_id": PAD}
FROM_IDS = ["Roberta", "Camembert", "XLMRoberta", "Data2VecText"]  # which skip the padding that they see, and no other
BEAM = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
BEAM |= {"sliding_window": 24, "num_hidden_layers": 4}  # the fourth layer is the first that scales its queries


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
    assert reason == why_not_share(model, gradients=True)
    assert (plain - shared).abs().max() < SAME


@pytest.mark.parametrize("family", [DECODERS["gpt2"], Family("beam", text_model("Beam", **BEAM))],
                         ids=lambda family: family.name)  # fmt: skip
def test_padding_that_counts(family):
    """Beam's scale is below the rounding of bfloat16, so it is known by its name, too."""
    model = build(family)
    model.config.model_type = "unknown"
    assert why_padding_counts(base_of(model)).startswith(COUNTS)
    assert why_not_share(model, gradients=True) is None


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
    assert (why_padding_counts(base), why_not_share(model, gradients=False)) == (None, None)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert base.rope_deltas is before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embeddings of type"),
        ({"layer_types": ["chunked_attention"] * 2}, "attention within chunks"),
        ({"attn_temperature_tuning": True}, "attention is scaled by the position"),
    ],
)
def test_what_begins_at_thousands_of_tokens(changed, reason):
    model = build("llama")
    vars(model.config).update(changed)
    assert why_padding_counts(model.model).startswith(reason)


def test_kernels_that_want_a_gpu_are_not_asked():
    model = as_flash(build("qwen2_5_vl"))
    attention = model.config.text_config._attn_implementation
    assert (why_padding_counts(model.model), why_not_share(model, gradients=False)) == (None, None)
    assert model.config.text_config._attn_implementation == attention


def test_a_model_that_cannot_read_two_rows_of_text_runs_plainly(monkeypatch):
    model, batch = with_head(build("llama")), make_batch("llama")

    def refuse(input_ids, past_key_values=None, **inputs):
        raise ValueError("an image, please")

    with monkeypatch.context() as only_images:
        only_images.setattr(model.model, "forward", refuse)
        assert why_not_share(model, gradients=False) == "its pass over two short rows fails: an image, please"
    plain, shared, report = plain_and_shared(model, batch)
    assert report.plain == {"its pass over two short rows fails: an image, please": 1}
    assert torch.equal(plain, shared)
