from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.models.compare import checkpointed, needs_shared, scored, with_head
from support.models.decoders import DECODERS, case
from support.models.eager_reference import SPECIAL_IDS, VISION_IDS, difference, masks_of, reference
from support.models.families import FAMILIES, OTHERS, build, make_batch

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.passes import run_pass
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, RolloutScorer
from vgr_trl.signals.probe import SimilarityProbe, cosine_similarity
from vgr_trl.signals.scoring import Want
from vgr_trl.trl_bridge import from_scoring

# InternVL's random model is very sure of itself; the linear attention of Qwen3.5 computes in blocks.
LOGPS = {"internvl": 2e-5, "qwen3_5": 2e-5}
COUNTS = {"images": (2, 0), "num_images": [2, 2, 2, 0, 0, 0]}


def scorer_of(model, **options):
    return RolloutScorer(model, vision_token_ids=VISION_IDS, special_token_ids=SPECIAL_IDS, **options)


def arguments(batch, **more):
    """Of `score`: the four tensors, and the image inputs as the processor returns them for prompts."""
    length = batch.completion_length
    inputs = dict(batch.inputs)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = inputs[name][:, :-length]
    tensors = (ids[:, :-length], mask[:, :-length], ids[:, -length:], mask[:, -length:])
    return tensors, {"num_generations": 3, **inputs, **more}


def score(scorer, batch, **more):
    tensors, options = arguments(batch, **more)
    return scorer.score(*tensors, **options)


def from_logits(model, batch, temperature=1.0):
    length = batch.completion_length
    with torch.no_grad():
        logits = model(**batch.inputs).logits[:, -length - 1 : -1].double() / temperature
    logps = logits.log_softmax(-1)
    tokens, mask = (batch.inputs[name][:, -length:] for name in ("input_ids", "attention_mask"))
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return (logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) * mask).float(), (entropies * mask).float()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "gemma3", "internvl", "idefics3"])
def test_families(name):
    model, batch = build(name), make_batch(name, images=COUNTS["images"])
    needs_shared(model)
    logps, entropies = from_logits(model, batch, temperature=0.7)
    expected = reference(model, batch)
    counts = {"num_images": COUNTS["num_images"]} if FAMILIES[name].picture else {}
    if name == "internvl":
        counts["num_tiles"] = [4, 4, 4, 0, 0, 0]  # one tile of the first image, three of the second
    for shares, size, given in (("on", None, counts), ("on", 2, counts), ("off", 2, counts), ("off", 3, {})):
        if not given and name == "internvl":
            continue  # of which the tokens do not say how many tiles there are
        scorer = scorer_of(model, share_prompts=shares, batch_size=size, temperature=0.7)
        tensors, options = arguments(batch, **given)
        with_attention = scorer.score(*tensors, **options)
        without = scorer.score(*tensors, **options, attention=False)
        assert without.attention is None
        assert torch.equal(with_attention.logps, without.logps), "to the last bit"
        assert torch.equal(with_attention.entropies, without.entropies)
        assert (with_attention.logps - logps).abs().max() < LOGPS.get(name, 4e-6)
        assert (with_attention.entropies - entropies).abs().max() < LOGPS.get(name, 4e-6)
        mass = with_attention.attention
        assert difference(mass.vision, expected.vision, expected.valid) < 1e-5
        assert difference(mass.instruction, expected.instruction, expected.valid) < 1e-5
        assert torch.equal(mass.mask, expected.valid)
        assert mass.num_vision.tolist() == expected.masks.vision.sum(1).tolist()


def test_adapters():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    logps, _ = from_logits(wrapped, batch)
    signals = score(scorer_of(wrapped), batch)
    assert (signals.logps - logps).abs().max() < 6e-6
    with wrapped.disable_adapter():
        without = score(scorer_of(wrapped), batch)
    assert (without.logps - logps).abs().max() > 1e-2


def test_a_model_that_trains():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    logps, _ = from_logits(model, batch)
    checkpointed(model).train()
    model.model.visual.eval()
    model.get_decoder().layers[0].self_attn.attention_dropout = 0.5
    modes = [module.training for module in model.modules()]
    signals = score(scorer_of(model), batch)
    assert (signals.logps - logps).abs().max() < 4e-6
    assert [module.training for module in model.modules()] == modes
    assert not signals.logps.requires_grad
    tensors, options = arguments(batch)
    tensors[3][1] = 0  # as where TRL masks truncated completions
    signals = scorer_of(model).score(*tensors, **options)
    assert not signals.logps[1].any()
    assert not signals.attention.mask[1].any()


def test_what_is_refused():
    with pytest.raises(ConfigError):
        scorer_of(get_peft_model(build("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)))
    (ids, mask, new_ids, new_mask), _ = arguments(make_batch("llama"))
    holes = new_mask.clone()
    holes[2, 3] = 0
    for prompts, given, new in ((ids.flip(1), mask.flip(1), new_mask), (ids, mask, holes)):
        with pytest.raises(DataError):
            RolloutScorer(build("llama")).score(prompts, given, new_ids, new, attention=False)
    with pytest.raises(ConfigError):
        score(RolloutScorer(build("llava")), make_batch("llava"))
    with pytest.raises(ConfigError, match="share_prompts is on, but prompts could not be shared"):
        score(RolloutScorer(build(OTHERS["jamba"]), share_prompts="on"), make_batch("llama"), attention=False)
    scorer, batch = scorer_of(build("qwen2_5_vl"), batch_size=3), make_batch("qwen2_5_vl")
    for more in ({"num_images": [1] * 5}, {"num_images": [1] * 6, "pixel_mask": torch.ones(1, 1)}):
        with pytest.raises(DataError):
            score(scorer, batch, **more)


@pytest.mark.parametrize("shares", ["auto", "off"])
@pytest.mark.parametrize("name", ["gemma2", "falcon_h1", "opt"])
def test_heads_of_other_kinds(name, shares):
    """Gemma caps logits, Falcon-H1 multiplies them, OPT's calls the decoder inside of its base model."""
    model, batch = case(DECODERS.get(name) or OTHERS[name])
    logps, entropies = from_logits(model, batch)
    signals = score(RolloutScorer(model, share_prompts=shares), batch, attention=False)
    assert (signals.logps - logps).abs().max() < 1e-5
    assert (signals.entropies - entropies).abs().max() < 2e-5


@pytest.mark.parametrize(("shares", "batch_size"), [("on", 3), ("off", None)])
def test_regions_and_similarity(shares, batch_size):
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl", images=COUNTS["images"])
    masks = masks_of(batch)
    masks.region = masks.vision & (masks.vision.cumsum(1) % 2 == 1)
    similar = SimilarityProbe(model, masks.vision, 1, "mean")
    with torch.no_grad(), AttentionProbe(model, masks) as probe, similar as near:
        model(**batch.inputs)
    tensors, named = arguments(batch, num_images=COUNTS["num_images"], regions=masks.region, similarity=True)
    scorer = scorer_of(model, share_prompts=shares, batch_size=batch_size, similarity_layer=1, similarity_over="mean")
    signals = scorer.score(*tensors, **named)
    valid = signals.mask
    assert difference(signals.attention.region, probe.mass.region, valid) < 1e-5
    assert torch.equal(signals.attention.num_region, probe.mass.num_region)
    assert torch.allclose(signals.similarity[valid], near.similarity[valid], atol=1e-5, equal_nan=True)
    assert signals.similarity[3:].isnan().all(), "rows without images"
    assert not signals.similarity[:3][valid[:3]].isnan().any()


def test_completions_do_not_see_their_future(paligemma, text_trainer):
    """TRL gives completions the token type 0, under which they do; the scorer and the trainer correct that."""
    trainer = text_trainer()
    model, batch = paligemma
    expected, _ = scored(with_head(model), batch)
    tensors, options = arguments(batch)  # token types of the prompts
    assert (scorer_of(model).score(*tensors, **options).logps - expected).abs().max() < 1e-5
    inputs = {"pixel_values": batch.inputs["pixel_values"], "num_images": [1] * 6}
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, 12, batch_size=3, token_type_ids=torch.zeros_like(ids), **inputs
        )
    assert (logps - expected)[mask[:, -12:].bool()].abs().max() < 1e-5
    given = from_scoring(ids, mask, 12, {"token_type_ids": torch.zeros_like(ids), **inputs})
    logps = run_pass.score(trainer.run, given, Want(), model).logps  # as rewards and views are scored
    assert (logps - expected)[mask[:, -12:].bool()].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("over", "expected"), [("max", [1.0, 0.8]), ("mean", [0.5, 0.7]), ("centre", [0.8**0.5, 0.8**0.5])]
)
def test_two_tokens_and_two_image_tokens_by_hand(over, expected):
    """(1, 0) and (3, 4) have cosines 1, 0 and 3/5, 4/5 to (2, 0) and (0, 1), and 2/√5 each to their mean (1, ½).

    Where the first token sees the first image token alone, the second both and a third none, its cosine is 1.
    """
    emitting, image = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert cosine_similarity(emitting[:2], image, over).tolist() == pytest.approx(expected)
    assert cosine_similarity(emitting, image[:0], over).isnan().all()
    found = cosine_similarity(emitting, image, over, torch.tensor([1, 2, 0]))
    assert found.tolist() == pytest.approx([1.0, expected[1], torch.nan], nan_ok=True)


def expected_similarity(model, batch, layer):
    with torch.no_grad():
        states = model(**batch.inputs, output_hidden_states=True).hidden_states[layer]
    vision = masks_of(batch).vision
    rows = []
    for row, seen in zip(states, vision, strict=True):
        image = row[: len(seen)][seen]
        cosines = torch.cosine_similarity(row[len(seen) - 1 : -1, None], image[None], dim=-1)  # (T, V)
        rows.append(cosines.amax(1) if len(image) else torch.full((len(row) - len(seen),), torch.nan))
    return torch.stack(rows)


@pytest.mark.parametrize("layer", [-1, 0, 1])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_against_the_states_that_the_model_returns(name, layer):
    model, batch = build(name), make_batch(name)
    expected = expected_similarity(model, batch, layer)
    vision = masks_of(batch).vision
    valid = batch.inputs["attention_mask"][:, vision.size(1) :].bool()
    for shared in (False, True):
        sharing = share_prompts(model, batch.completion_length) if shared else nullcontext()
        with torch.no_grad(), SimilarityProbe(model, vision, layer) as probe, sharing as report:
            model(**batch.inputs)
        assert torch.allclose(probe.similarity[valid], expected[valid], atol=1e-5, equal_nan=True), shared
    assert not report.plain, "prompts were shared"
