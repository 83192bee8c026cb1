"""Attention measured while a model generates: the same as by scoring what it has generated."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models.eager_reference import SPECIAL_IDS, VISION, VISION_IDS, masks_of
from support.models.families import CLOSE, EOS, IMAGE, OPEN, PAD, VIDEO, Batch, build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, GenerationProbe
from vgr_trl.utils import ConfigError

STEPS = 7
WORDS_ONLY = {"do_sample": True, "suppress_tokens": [IMAGE, VIDEO, OPEN, CLOSE]}


def probe_of(model):
    return GenerationProbe(model, vision_token_ids=VISION_IDS, special_token_ids=SPECIAL_IDS)


def scored(model, batch, sequences):
    """Mass of `sequences` (N, P + T) by scoring, and which of their new tokens count, (N, T)."""
    prompt = batch.inputs["input_ids"].size(1) - batch.completion_length
    new = sequences[:, prompt:]
    ended = (new == EOS).cumsum(1)
    valid = (ended == 0) | ((ended == 1) & (new == EOS))
    inputs = dict(batch.inputs)
    inputs["input_ids"] = sequences
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"][:, :prompt], valid.long()], dim=1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(inputs[name][:, :prompt], (0, new.size(1)))
    again = Batch(inputs, new.size(1), batch.prompts)
    with torch.no_grad(), AttentionProbe(model, masks_of(again)) as probe:
        model(**inputs)
    return probe.mass, valid


def assert_same(found, expected, valid):
    """Up to 1e-5, where tokens count."""
    for name in ("vision", "instruction"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.shape == other.shape
        assert float((one - other).abs().where(valid, 0.0).max()) < 1e-5
    assert torch.equal(found.num_vision, expected.num_vision)
    assert torch.equal(found.num_instruction, expected.num_instruction)


@pytest.mark.parametrize("shares", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("name", [*VISION, "mistral"])
def test_generation_and_scoring_agree(name, shares):
    """Prompts padded on the left, some with several images; windows of 24 keys in Gemma 3 and Mistral."""
    model, batch = build(name), make_batch(name, images=(2, 1))
    implementations = {key: part._attn_implementation for key, part in configs(model).items()}
    torch.manual_seed(3)
    if shares:
        with share_prompts(model) as report, probe_of(model) as probe:
            sequences = model.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=STEPS)
        assert report.prompts_per_row == 1 / 3
    else:
        with probe_of(model) as probe:
            sequences = model.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=STEPS)
    assert isinstance(sequences, torch.Tensor)
    assert {key: part._attn_implementation for key, part in configs(model).items()} == implementations
    assert implementations[""] == "sdpa"
    expected, valid = scored(model, batch, sequences)
    assert probe.mass.vision.shape == (len(model.get_decoder().layers) - (name == "qwen3_5"), 6, STEPS)
    assert_same(probe.mass, expected, valid)
    assert probe.mass.mask.all()


def configs(model):
    parts = {"": model.config, "text": model.config.get_text_config()}
    return parts | ({"vision": model.config.vision_config} if hasattr(model.config, "vision_config") else {})


def test_only_the_language_model_attends_eagerly():
    model, batch = build("llava"), make_batch("llava")
    seen = {}
    modules = {"text": model.get_decoder().layers[0], "vision": model.model.vision_tower}
    for name, module in modules.items():
        part = configs(model)[name]
        module.register_forward_pre_hook(
            lambda *_, name=name, part=part: seen.update({name: part._attn_implementation})
        )
    with probe_of(model):
        model.generate(**batch.prompt_inputs(), max_new_tokens=2)
    assert seen == {"text": "eager", "vision": "sdpa"}


def test_tokens_after_the_end_of_some_rows():
    """Rows that have ended get padding; the others go on, and are measured to their end."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    torch.manual_seed(0)
    model.lm_head.weight.data[EOS] *= 6
    with probe_of(model) as probe:
        sequences = model.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=12)
    assert (sequences[:, -1] == PAD).any()
    expected, valid = scored(model, batch, sequences)
    assert not valid.all()
    assert_same(probe.mass, expected, valid)


def test_several_completions_per_row():
    model, batch = build("llava"), make_batch("llava", generations=1, images=(1, 1))
    with probe_of(model) as probe:
        sequences = model.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=STEPS, num_return_sequences=3)
    batch.inputs = {name: value.repeat_interleave(3, dim=0) for name, value in batch.inputs.items()}
    assert_same(probe.mass, *scored(model, batch, sequences))


def test_adapters():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    with probe_of(wrapped) as probe:
        sequences = wrapped.generate(**batch.prompt_inputs(), **WORDS_ONLY, max_new_tokens=STEPS)
    assert_same(probe.mass, *scored(wrapped, batch, sequences))


def test_outputs_that_were_asked_for():
    model, batch = build("llava"), make_batch("llava")
    with probe_of(model):
        outputs = model.generate(**batch.prompt_inputs(), max_new_tokens=2, return_dict_in_generate=True)
    assert outputs.sequences.size(1) == batch.inputs["input_ids"].size(1) - 10


class TestRefusals:
    @pytest.fixture
    def case(self):
        return build("llava"), make_batch("llava").prompt_inputs()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_beams": 2}, "during beam_search: generate greedily or by sampling"),
            ({"num_beams": 2, "do_sample": True}, "during beam_sample"),
            ({"prompt_lookup_num_tokens": 2}, "during assisted_generation"),
            ({"cache_implementation": "static"}, "with a cache of fixed length"),
        ],
    )
    def test_ways_to_generate(self, case, options, message):
        model, inputs = case
        with pytest.raises(ConfigError, match=message), probe_of(model):
            model.generate(**inputs, max_new_tokens=3, **options)
        assert model.config.text_config._attn_implementation == "sdpa"

    def test_embeddings_instead_of_tokens(self, case):
        model, inputs = case
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        with pytest.raises(ConfigError, match="only where generate is given input_ids"), probe_of(model):
            model.generate(inputs_embeds=embeds, max_new_tokens=2)

    def test_a_model_whose_attention_cannot_be_changed(self, case, monkeypatch):
        model, inputs = case
        monkeypatch.setattr(type(model.get_decoder()), "_can_set_attn_implementation", lambda *_: False)
        with pytest.raises(ConfigError, match="attention of LlamaModel cannot be made eager"), probe_of(model):
            model.generate(**inputs, max_new_tokens=2)

    def test_nothing_generated(self, case):
        model, _ = case
        with probe_of(model) as probe:
            pass
        with pytest.raises(ConfigError, match="Nothing has been generated"):
            _ = probe.mass
        assert "generate" not in vars(model)
