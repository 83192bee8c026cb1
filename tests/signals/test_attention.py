from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers as hf
from support.models import eager_reference as eager
from support.models.compare import checkpointed, loss_of, needs_shared, why_plain, with_head
from support.models.decoders import DECODERS, SPEECH, case
from support.models.families import CLOSE, EOS, IMAGE, OPEN, OTHERS, VIDEO, Family, build, make_batch, text_model
from support.models.flash_on_cpu import as_flash, with_kernels
from test_scoring import arguments, scorer_of

from vgr_trl.errors import ConfigError
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, GenerationProbe
from vgr_trl.signals.probe import count_attention_layers

FAMILIES = ["qwen2_5_vl", "qwen3_5", "gemma3", "llava_next", "idefics3"]
CASES = [*((name, (2, 1)) for name in FAMILIES), ("qwen2_5_vl", (0, 2))]
KINDS = {
    "windows": text_model("Mistral", sliding_window=8),
    "sinks": text_model("GptOss", sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
    "softcapping": text_model("Gemma2", sliding_window=512, attn_logit_softcapping=2.0),
}
STEPS = 7
WORDS_ONLY = {"do_sample": True, "suppress_tokens": [IMAGE, VIDEO, OPEN, CLOSE]}
TEMPERATURE = 0.7


def passed(model, batch, shares, *arguments, **options):
    sharing = share_prompts(model, batch.completion_length) if shares else nullcontext()
    with torch.no_grad(), AttentionProbe(model, *arguments, **options) as probe, sharing as report:
        model(**batch.inputs)
    assert not shares or report.prompts_per_row < 1
    return probe


def assert_measured(model, batch, expected, sharing=(False, True), **options):
    for shares in sharing:
        probe = passed(model, batch, shares, expected.masks, measure_prompt=True, **options)
        eager.assert_agrees(probe, expected)
        eager.assert_prompt_agrees(probe, expected)
        assert count_attention_layers(model) == len(probe.mass.vision)


@pytest.mark.parametrize(("name", "images"), CASES)
def test_families(name, images):
    model, batch = build(name), make_batch(name, images=images)
    needs_shared(model)
    expected = eager.reference(model, batch)
    assert expected.vision[:, :, 0].max() > 0.05
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_measured(model, batch, expected)
    with torch.no_grad():
        for sharing in (nullcontext, partial(share_prompts, model, batch.completion_length)):
            with sharing():
                plain = model(**batch.inputs).logits
            with AttentionProbe(model, expected.masks), sharing():
                assert torch.equal(model(**batch.inputs).logits, plain), "to the last bit"


@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "opt", "bart", "gemma3n"])
def test_kinds_of_attention_and_of_decoders(kind):
    """The head of OPT calls the decoder inside of its base model; layers of Gemma 3n take keys from others."""
    model, batch = case(Family(kind, KINDS[kind]) if kind in KINDS else DECODERS.get(kind) or OTHERS[kind])
    if kind in ("sinks", "softcapping"):
        model.set_attn_implementation("eager")
    expected = eager.reference(model, batch)
    assert expected.vision[:, :, 0].max() > 0.01
    if kind == "windows":  # 8 keys wide: the last queries see nothing of the prompt
        assert expected.vision[:, 0, -1].max() == 0 < expected.vision[:, 0, 0].min()
    assert_measured(model, batch, expected, sharing=(False, True) if kind in (*KINDS, "gpt2") else (False,))


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_training_passes(reentrant, shares):
    """Recomputation in the backward pass comes through the same layers again, and changes nothing."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    expected = eager.reference(model, batch)
    with_head(model).train()
    if reentrant is not None:
        checkpointed(model, {"use_reentrant": reentrant})
        model.enable_input_require_grads()
    sharing = share_prompts(model, 12) if shares else nullcontext()
    with AttentionProbe(model, expected.masks, measure_prompt=True) as probe, sharing as report:
        loss_of(model, batch).backward()
    if shares:
        assert bool(report.plain) == (why_plain(model) is not None)
    eager.assert_agrees(probe, expected)
    eager.assert_prompt_agrees(probe, expected)
    assert not probe.mass.vision.requires_grad


def test_chosen_queries_and_kept_maps():
    """More vision tokens than a head is wide, so that several calls are needed."""
    model, batch = build("llava_next"), make_batch("llava_next", images=(2, 1))
    expected = eager.reference(model, batch)
    prompt = expected.masks.vision.size(1)
    positions = [prompt + 3, prompt - 10, prompt - 10, -5]
    weights = expected.weights[:, :, positions, :prompt]
    emitted = batch.inputs["attention_mask"].roll(-1, 1)  # the last token of a completion emits none, and does not run
    valid = emitted[:, positions].bool()
    kept = weights[:, 3][:, :, expected.masks.vision[3]]
    assert kept.size(2) > 16
    for shares in (False, True):
        probe = passed(model, batch, shares, expected.masks, rows=positions, keep_rows=(3,))
        for found, mask in (
            (probe.mass.vision, expected.masks.vision),
            (probe.mass.instruction, expected.masks.instruction),
        ):
            assert eager.difference(found, (weights * mask[:, None]).sum(-1), valid) < eager.TOLERANCE
        assert torch.allclose(probe.kept[3][:, valid[3]], kept[:, valid[3]], atol=eager.TOLERANCE)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_on_what_comes_later(paligemma, implementation):
    """Instruction tokens in front of the image pay it attention here."""
    model, batch = paligemma
    expected = eager.reference(model, batch)
    masks = expected.masks
    first_image = masks.vision.int().argmax(1)  # (N,)
    before = masks.instruction & (torch.arange(masks.vision.size(1)) < first_image.unsqueeze(1))  # (N, P)
    prompt = masks.vision.size(1)
    on_image = (expected.weights[:, :, :prompt, :prompt] * masks.vision[:, None]).sum(-1)  # (L, N, P)
    assert on_image[:, before].max() > 0.05
    model.set_attn_implementation(implementation)
    assert_measured(model, batch, expected, sharing=(False,))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral"])
def test_flash_attention(name, padded, monkeypatch):
    """Whose kernels take no mask: padding is cut out of the rows, and queries end with keys."""
    model = build(name)
    batch = make_batch(name, text=(21, 33) if padded else (24, 24), images=(1, 0) if padded else (1, 1))
    prompt = batch.inputs["input_ids"].size(1) - 12
    if name == "mistral":
        batch.inputs["input_ids"][:, prompt - 6 : prompt - 2] = eager.VISION_IDS[0]
    if not padded:
        batch.inputs["attention_mask"] = torch.ones_like(batch.inputs["attention_mask"])
    expected = eager.reference(model, batch)
    packed = with_kernels(monkeypatch)
    as_flash(model)
    with torch.no_grad(), AttentionProbe(model, expected.masks, measure_prompt=True, keep_rows=(1,)) as probe:
        model(**batch.inputs)
    eager.assert_agrees(probe, expected)
    eager.assert_prompt_agrees(probe, expected)
    assert bool(packed) == padded
    probe = passed(model, batch, True, expected.masks, rows=[prompt + 9, prompt + 5, prompt - 1])
    seen, valid = expected.vision[:, :, [10, 6, 0]], expected.valid[:, [10, 6, 0]]  # the tokens that these emit
    assert eager.difference(probe.mass.vision, seen, valid) < eager.TOLERANCE


def test_packed_sequences(monkeypatch):
    with_kernels(monkeypatch)
    model, batch = as_flash(build("llama")), make_batch("llama")
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    refused = pytest.raises(ConfigError)
    with torch.no_grad(), refused, AttentionProbe(model, eager.masks_of(batch)):
        model(**batch.inputs, **packed)


def probe_of(model):
    tokens = {"vision_token_ids": eager.VISION_IDS, "special_token_ids": eager.SPECIAL_IDS}
    return GenerationProbe(model, **tokens, temperature=TEMPERATURE)


def scored(model, batch, sequences):
    (ids, mask, *_), options = arguments(batch)
    new = sequences[:, ids.size(1) :]
    ended = (new == EOS).cumsum(1)
    valid = (ended == 0) | ((ended == 1) & (new == EOS))
    scorer = scorer_of(model, share_prompts="off", temperature=TEMPERATURE)
    return scorer.score(ids, mask, new, valid.long(), **options), valid


@pytest.mark.parametrize(
    ("name", "shares"), [*((name, True) for name in ("qwen2_5_vl", "qwen3_5", "mistral")), ("gemma3", False)]
)
def test_generation_and_scoring_agree(name, shares):
    """Prompts padded on the left, some with several images; windows of 24 keys in Gemma 3 and Mistral."""
    model, batch = build(name), make_batch(name, images=(2, 1))
    if shares:
        needs_shared(model)
    torch.manual_seed(3)
    with share_prompts(model) if shares else nullcontext() as report, probe_of(model) as probe:
        sequences = model.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=STEPS)
    assert not shares or report.prompts_per_row == 1 / 3
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    expected, valid = scored(model, batch, sequences)
    assert probe.mass.vision.shape == (len(model.get_decoder().layers) - (name == "qwen3_5"), 6, STEPS)
    assert eager.difference(probe.mass.vision, expected.attention.vision, valid) < 1e-5
    assert eager.difference(probe.mass.instruction, expected.attention.instruction, valid) < 1e-5
    assert torch.equal(probe.mass.num_vision, expected.attention.num_vision)
    assert probe.mass.mask.all()
    assert eager.difference(probe.logps, expected.logps, valid) < 1e-5
    assert eager.difference(probe.entropies, expected.entropies, valid) < 1e-5


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"cache_implementation": "static"}])
def test_ways_to_generate_that_are_refused(options):
    model, inputs = build("llava"), make_batch("llava").prompt_inputs()
    with pytest.raises(ConfigError), probe_of(model):
        model.generate(**inputs, max_new_tokens=3, **options)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert "generate" not in vars(model)


def test_models_that_cannot_be_measured():
    compiled, flexible = build("llava"), build("llava")
    compiled._compiled_call_impl = compiled._call_impl  # as `model.compile()` does
    flexible.set_attn_implementation("flex_attention")
    encoder = hf.BartForConditionalGeneration(hf.BartConfig(**SPEECH))
    for model in (flexible, compiled, build(OTHERS["mamba"]), build(DECODERS["falcon"]), encoder):
        with pytest.raises(ConfigError):
            AttentionProbe(model, eager.masks_of(make_batch("llava")))
