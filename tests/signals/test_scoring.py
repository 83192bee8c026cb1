"""`RolloutScorer` against the logits of a whole pass, in every way it can score."""

import inspect

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.models.compare import checkpointed, needs_shared, with_head
from support.models.eager_reference import SPECIAL_IDS, VISION, VISION_IDS, difference, masks_of, reference
from support.models.families import FAMILIES, IMAGE, build, make_batch
from support.models.other_families import OTHERS

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, RolloutScorer
from vgr_trl.signals.similarity import SimilarityProbe
from vgr_trl.utils import ConfigError, DataError

# InternVL's random model is very sure of itself; the linear attention of Qwen3.5 computes in blocks.
LOGPS = {"internvl": 2e-5, "qwen3_5": 2e-5}


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
    """Log-probabilities and entropies by definition, 0 in the padding."""
    length = batch.completion_length
    with torch.no_grad():
        logits = model(**batch.inputs).logits[:, -length - 1 : -1].double() / temperature
    logps = logits.log_softmax(-1)
    tokens, mask = (batch.inputs[name][:, -length:] for name in ("input_ids", "attention_mask"))
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return (logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) * mask).float(), (entropies * mask).float()


COUNTS = {"images": (2, 0), "num_images": [2, 2, 2, 0, 0, 0]}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    """Two images in some rows, none in others; at once and in chunks; shared and not."""
    model, batch = build(name), make_batch(name, images=COUNTS["images"])
    needs_shared(model)
    logps, entropies = from_logits(model, batch, temperature=0.7)
    expected = reference(model, batch)
    counts = {"num_images": COUNTS["num_images"]} if FAMILIES[name].picture else {}
    if name == "internvl":
        counts["num_tiles"] = [4, 4, 4, 0, 0, 0]  # one tile of the first image, three of the second
    for shares in ("on", "off"):
        for size in (None, 2):
            scorer = scorer_of(model, share_prompts=shares, batch_size=size, temperature=0.7)
            tensors, options = arguments(batch, **counts)
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
            assert torch.equal(with_attention.mask, expected.valid)
            assert mass.num_vision.tolist() == expected.masks.vision.sum(1).tolist()


@pytest.mark.parametrize("name", VISION)
def test_chunks_whose_images_are_told_by_the_tokens(name):
    """The second prompt's chunk has no image; the first prompt's has two, of different sizes where a family allows."""
    model, batch = build(name), make_batch(name, images=COUNTS["images"])
    logps, _ = from_logits(model, batch)
    signals = score(scorer_of(model, batch_size=3), batch, attention=False)
    assert (signals.logps - logps).abs().max() < LOGPS.get(name, 4e-6)


@pytest.mark.parametrize("shares", ["auto", "off"])
@pytest.mark.parametrize("name", ["gemma2", "falcon_h1", "gemma4", "phi3"])
def test_heads_that_scale_and_cap(name, shares):
    """Gemma caps logits, Falcon-H1 multiplies them: whatever the model's own forward does."""
    family = OTHERS[name]
    model, batch = build(family), make_batch(family)
    logps, entropies = from_logits(model, batch)
    signals = score(RolloutScorer(model, share_prompts=shares), batch, attention=False)
    assert (signals.logps - logps).abs().max() < 1e-5
    assert (signals.entropies - entropies).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_patched_by_trl(name):
    model, batch = build(name), make_batch(name)
    logps, entropies = from_logits(model, batch)
    signals = score(scorer_of(with_head(model)), batch)
    assert (signals.logps - logps).abs().max() < 4e-6
    assert (signals.entropies - entropies).abs().max() < 6e-6


def test_inside_of_share_prompts():
    """The head's passes are none of those that are shared."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    logps, _ = from_logits(model, batch)
    with share_prompts(model, 12) as report:
        signals = score(scorer_of(model, share_prompts="off"), batch)
    assert (report.prompts, report.rows, dict(report.plain)) == (2, 6, {})
    assert (signals.logps - logps).abs().max() < 4e-6


@pytest.mark.parametrize("trained", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_adapters(trained):
    """Also in the head."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=trained, init_lora_weights=False))
    logps, _ = from_logits(wrapped, batch)
    signals = score(scorer_of(wrapped), batch)
    assert (signals.logps - logps).abs().max() < 6e-6
    with wrapped.disable_adapter():
        without = score(scorer_of(wrapped), batch)
    assert (without.logps - logps).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt learning"),
        (LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[IMAGE]), "aLoRA"),
    ],
)
def test_an_adapter_that_acts_outside_the_base_model_is_refused(config, named):
    with pytest.raises(ConfigError, match=named):
        scorer_of(get_peft_model(build("qwen3"), config))


def test_mode_of_every_module_is_restored():
    """A frozen part that rests in evaluation mode stays there; dropout and checkpointing are off while scoring."""
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
    with pytest.raises(DataError):
        score(scorer_of(model, batch_size=3), batch, num_images=[1] * 5)
    assert [module.training for module in model.modules()] == modes


def test_bf16():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    expected = scorer_of(model).score(*arguments(batch)[0], **arguments(batch)[1])
    batch.inputs["pixel_values"] = batch.inputs["pixel_values"].bfloat16()
    signals = score(scorer_of(model.bfloat16()), batch)
    for one in (signals.logps, signals.entropies, signals.attention.vision):
        assert one.dtype == torch.float32
    # Log-probabilities of a random model differ by up to 4 from each other.
    assert (signals.logps - expected.logps).abs().max() < 0.15
    mask = expected.mask
    assert difference(signals.attention.vision, expected.attention.vision, mask) < 0.03


def test_completions_without_tokens_that_count():
    """As where TRL masks truncated completions."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    tensors, options = arguments(batch)
    tensors[3][1] = 0
    signals = scorer_of(model).score(*tensors, **options)
    assert not signals.logps[1].any()
    assert not signals.attention.mask[1].any()
    tensors[3][:] = 0
    signals = scorer_of(model).score(*tensors, **options)
    assert not signals.logps.any()


def test_forbidden_tokens_add_nothing_to_the_entropy():
    """A head that gives them -inf, with all others alike: the entropy is the logarithm of their number."""
    model, batch = build("llama"), make_batch("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: original(hidden).index_fill(-1, torch.arange(90, 96), -torch.inf)
    tensors, options = arguments(batch)
    tensors[2].clamp_(max=80)
    signals = RolloutScorer(model).score(*tensors, **options, attention=False)
    expected = tensors[3] * torch.tensor(90.0).log()
    assert torch.allclose(signals.entropies, expected, atol=1e-5)
    assert torch.allclose(signals.logps, -expected, atol=1e-5)


def test_ids_of_vision_tokens_from_the_configuration():
    model, batch = build("llava"), make_batch("llava")
    found = score(RolloutScorer(model, special_token_ids=SPECIAL_IDS), batch)
    assert torch.equal(found.attention.vision, score(scorer_of(model), batch).attention.vision)
    assert found.attention.num_vision.tolist() == [16] * 6


def test_number_of_passes(monkeypatch):
    """One per chunk, for two prompts with three completions each; the vision tower sees each image once."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    rows, images = [], []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: images.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    tensors, options = arguments(batch, num_images=[1] * 6)
    scorer_of(model, batch_size=1).score(*tensors, **options)
    assert (rows, images) == ([1, 3, 1, 3], [1, 1])
    rows.clear()
    images.clear()
    scorer_of(model, share_prompts="off", batch_size=1).score(*tensors, **options)
    assert (rows, images) == ([1] * 6, [1] * 6)


def test_signature():
    """The one that is documented."""
    assert list(inspect.signature(RolloutScorer.score).parameters)[1:] == [
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "num_generations",
        "attention",
        "similarity",
        "regions",
        "num_images",
        "num_tiles",
        "image_inputs",
    ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"share_prompts": "yes"}, "share_prompts is 'yes': give auto, on or off"),
            ({"batch_size": 0}, "batch_size is 0: give an integer of at least 1, or None"),
            ({"temperature": 0.0}, "temperature is 0.0: give a number above 0"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ConfigError, match=message):
            RolloutScorer(build("llama"), **options)

    def test_models(self):
        with pytest.raises(ConfigError, match="LlamaModel has no head: give a model that returns logits"):
            RolloutScorer(build("llama").model)
        model = build("llama")
        model.lm_head.weight.ds_numel, model.lm_head.weight.data = 96 * 32, torch.empty(0)
        with pytest.raises(ConfigError, match="parameters of the model are sharded: score in DAPOTrainer"):
            RolloutScorer(model)

    def test_attention_without_ids(self):
        model, batch = build("llava"), make_batch("llava")
        with pytest.raises(ConfigError, match="cannot be measured without special_token_ids"):
            score(RolloutScorer(model), batch)
        with pytest.raises(ConfigError, match="cannot be measured without vision_token_ids"):
            RolloutScorer(build("llama"), special_token_ids=()).score(*arguments(make_batch("llama"))[0])

    def test_prompts_that_cannot_be_shared(self):
        model, batch = build(OTHERS["jamba"]), make_batch("llama")
        score(RolloutScorer(model), batch, attention=False)
        with pytest.raises(ConfigError, match="share_prompts is on, but prompts could not be shared: layers of type"):
            score(RolloutScorer(model, share_prompts="on"), batch, attention=False)

    def test_nothing_to_share_is_no_error(self):
        model, batch = build("llama"), make_batch("llama", generations=1)
        tensors, _ = arguments(batch)
        scored = RolloutScorer(model, share_prompts="on").score(*tensors, attention=False)
        plain = RolloutScorer(model, share_prompts="off").score(*tensors, attention=False)
        assert scored.logps.equal(plain.logps)

    def test_shapes(self):
        model, batch = build("llama"), make_batch("llama")
        (ids, mask, new_ids, new_mask), _ = arguments(batch)
        scorer = RolloutScorer(model)
        for tensors in (
            (ids, mask[:, 1:], new_ids, new_mask),
            (ids, mask, new_ids, new_mask[:, 1:]),
            (ids[1:], mask[1:], new_ids, new_mask),
            (ids, mask, new_ids[:, :0], new_mask[:, :0]),
        ):
            with pytest.raises(DataError, match=r"give \(N, P\) twice and \(N, T\) twice, with at least one row"):
                scorer.score(*tensors, attention=False)
        with pytest.raises(DataError, match="6 completions with num_generations 4: give whole groups"):
            scorer.score(ids, mask, new_ids, new_mask, num_generations=4)
        with pytest.raises(DataError, match="pad prompts on the left"):
            scorer.score(ids.flip(1), mask.flip(1), new_ids, new_mask)

    def test_holes_in_completions(self):
        """The mask is that of the attention too: later tokens would not see the one that is left out."""
        model, batch = build("llama"), make_batch("llama")
        tensors, options = arguments(batch)
        for column in (0, 3):
            mask = tensors[3].clone()
            mask[2, column] = 0
            with pytest.raises(DataError, match="completion_mask has a 0 in front of a 1: .* give 1 for every token"):
                RolloutScorer(model).score(*tensors[:3], mask, **options, attention=False)

    def test_images_of_chunks(self):
        model, batch = build("llava"), make_batch("llava")
        scorer = scorer_of(model, batch_size=3)
        for counts in ({"num_images": [1] * 5}, {"num_images": [1] * 6, "num_tiles": [1]}):
            with pytest.raises(DataError, match="for 6 rows that pass in chunks: give one number for each row"):
                score(scorer, batch, **counts)
        with pytest.raises(DataError, match="more than 0 where the prompt has placeholder tokens of images, else 0"):
            score(scorer, batch, num_images=[2, 2, 2, 0, 0, 0])
        with pytest.raises(DataError, match="The input other cannot be cut into chunks: score all rows at once"):
            score(scorer, batch, num_images=[1] * 6, other=torch.ones(6))
        score(scorer_of(model), batch)  # at once nobody needs to know


def test_vision_ids_are_those_of_the_batches():
    """What the comparisons above rest on."""
    assert IMAGE in VISION_IDS
    assert set(VISION) < set(FAMILIES)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("shares", ["on", "off"])
def test_regions_and_similarity(shares, batch_size):
    """In chunks and shared, what the probes measure of the whole batch in one plain pass."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl", images=COUNTS["images"])
    masks = masks_of(batch)
    masks.region = masks.vision & (masks.vision.cumsum(1) % 2 == 1)
    with (
        torch.no_grad(),
        AttentionProbe(model, masks) as probe,
        SimilarityProbe(model, masks.vision, 1, "mean") as near,
    ):
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


def test_regions_that_fit_no_prompt():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    tensors, named = arguments(batch)
    scorer = scorer_of(model)
    with pytest.raises(DataError, match="regions has the shape .* give one value for each token of a prompt"):
        scorer.score(*tensors, **named, regions=tensors[0][:, 1:] > 0)
    with pytest.raises(DataError, match="and attention=True"):
        scorer.score(*tensors, **named, regions=tensors[0] > 0, attention=False)
