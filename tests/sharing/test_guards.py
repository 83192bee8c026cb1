"""What would be silently wrong runs plainly; without its guard it is wrong, which shows that the guard is needed."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from peft import PrefixTuningConfig, get_peft_model
from support.models.compare import (
    checkpointed,
    generated,
    gradients,
    largest_relative,
    plain_and_shared,
    scored,
    with_head,
)
from support.models.families import (
    BODY,
    FAMILIES,
    OPEN,
    PAD,
    PIXEL_INPUTS,
    VIDEO,
    build,
    make_batch,
    randomise,
)
from support.models.other_families import OTHERS

from vgr_trl.sharing import (
    leave_out_empty_images,
    model_support,
    prefix_cache,
    prefix_forward,
    share_prompts,
    why_not_share,
)
from vgr_trl.utils import DataError

WRONG = 1e-2
SAME = 1e-6  # a plain pass, whose head scores fewer columns


def nothing(*args, **kwargs):
    """In place of a guard."""


def runs_plainly(model, batch, reason):
    plain, shared, report = plain_and_shared(model, batch)
    assert report.plain == {reason: 1}
    assert torch.equal(plain, shared)


def runs_plainly_twice(model, batch, reason):
    """When it scores, and when it generates."""
    with torch.no_grad():
        plain, _ = scored(model, batch)
        with share_prompts(model, 12) as report:
            shared, _ = scored(model, batch)
            generated(model, batch, sample=False)
    assert report.plain == {reason: 2}
    assert torch.equal(plain, shared)


def goes_wrong(model, batch):
    plain, shared, report = plain_and_shared(model, batch)
    assert not report.plain
    assert (plain - shared).abs().max() > WRONG


@pytest.fixture
def case():
    return with_head(build("qwen2_5_vl")).train(), make_batch("qwen2_5_vl")


def shared_gradients(model, batch):
    with share_prompts(model, 12) as report:
        return gradients(model, batch), report


def trains_plainly(model, batch, plain, reason):
    shared, report = shared_gradients(model, batch)
    assert report.plain == {reason: 1}
    assert largest_relative(plain, shared) < SAME


def test_checkpoints_that_drop_caches(case, monkeypatch):
    """As those of transformers 5.9 and 5.10, which do not know the switch that keeps them."""
    model, _ = case
    monkeypatch.delattr("transformers.modeling_layers.GradientCheckpointingLayer._can_checkpoint_with_cache")
    assert why_not_share(model, gradients=True) is None
    checkpointed(model)
    assert "layers then drop caches" in why_not_share(model, gradients=True)
    assert why_not_share(model, gradients=False) is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing(case, monkeypatch):
    model, batch = case
    checkpointed(model, {"use_reentrant": True})
    model.enable_input_require_grads()
    plain = gradients(model, batch)
    trains_plainly(model, batch, plain, "gradient checkpointing with use_reentrant=True")
    monkeypatch.setattr(model_support, "recomputes_without_graph", lambda base: False)
    trains_plainly(model, batch, plain, "the model kept the prompt without its gradients")
    monkeypatch.setattr(prefix_forward, "check_written", nothing)
    shared, report = shared_gradients(model, batch)
    assert not report.plain
    assert largest_relative(plain, shared) > WRONG


def test_a_cache_cut_off_from_the_graph(case, monkeypatch):
    model, batch = case
    attention = model.model.language_model.layers[1].self_attn
    update = prefix_cache.StoredKeys.lazy_initialization

    def detached(self, keys, values):
        cut = self is caches[0].layers[attention.layer_idx]
        update(self, keys.detach() if cut else keys, values.detach() if cut else values)

    caches, make = [], prefix_forward.prefix_to_write
    monkeypatch.setattr(prefix_forward, "prefix_to_write", lambda config: caches.insert(0, make(config)) or caches[0])
    monkeypatch.setattr(prefix_cache.StoredKeys, "lazy_initialization", detached)
    plain = gradients(model, batch)
    trains_plainly(model, batch, plain, "the model kept the prompt without its gradients")
    monkeypatch.setattr(prefix_forward, "check_written", nothing)
    shared, _ = shared_gradients(model, batch)
    assert largest_relative(plain, shared) > WRONG


def test_checkpoints_that_drop_the_cache(case, monkeypatch):
    model, batch = case
    checkpointed(model)
    plain = gradients(model, batch)
    monkeypatch.setattr(prefix_forward, "_cache_through_checkpoints", lambda base: nullcontext())
    trains_plainly(model, batch, plain, "the model did not keep the whole prompt in its cache")

    monkeypatch.setattr(prefix_forward, "check_written", nothing)
    _, report = shared_gradients(model, batch)
    assert report.plain == {"the model did not read the prompt from its cache": 1}

    monkeypatch.setattr(prefix_forward, "check_read", nothing)
    monkeypatch.setattr(prefix_cache.StoredKeys, "length", lambda self: 0)
    shared, report = shared_gradients(model, batch)
    assert not report.plain
    assert largest_relative(plain, shared) > WRONG


def test_an_unsupported_model_is_not_tried_again(case, monkeypatch):
    model, batch = case
    checkpointed(model)
    monkeypatch.setattr(prefix_forward, "_cache_through_checkpoints", lambda base: nullcontext())
    tries = []
    make = prefix_forward.prefix_to_write
    monkeypatch.setattr(prefix_forward, "prefix_to_write", lambda config: tries.append(1) or make(config))
    with share_prompts(model, 12) as report:
        gradients(model, batch)
        gradients(model, batch)
        with torch.no_grad():
            scored(model.eval(), batch)
    assert len(tries) == 2  # once with gradients, once without
    assert report.plain == {"the model did not keep the whole prompt in its cache": 2}


def test_an_indicator_of_images_in_a_completion():
    """Ovis2 embeds it as text where the pass has no images, as behind a shared prompt."""
    model, batch = with_head(build(OTHERS["ovis2"])), make_batch(OTHERS["ovis2"])
    batch.inputs["input_ids"][0, -9] = OPEN
    plain, shared, report = plain_and_shared(model, batch)
    assert torch.equal(plain, shared)
    assert report.plain == {"tokens whose embeddings depend on whether the pass has images": 1}


def test_token_types_that_open_a_prompt_to_itself(monkeypatch):
    """In PaliGemma all tokens of type 0 see each other, so the last token of a prompt changes the others."""
    model, batch = with_head(build(OTHERS["paligemma"])), make_batch(OTHERS["paligemma"])
    types = torch.zeros_like(batch.inputs["input_ids"])
    types[:, -12:] = 1
    batch.inputs["token_type_ids"] = types
    runs_plainly(model, batch, "bidirectional attention over text")
    monkeypatch.setattr(model_support, "check_layers", nothing)
    monkeypatch.setattr(model_support, "check_causal_attention", nothing)
    runs_plainly(model, batch, "token_type_ids")
    monkeypatch.setattr(model_support, "_TOKEN_TYPES_MARK_IMAGES", ("paligemma",))
    goes_wrong(model, batch)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2, "do_sample": False}, "beams"),
        ({"use_cache": False}, "growing cache"),
        ({"cache_implementation": "static"}, "growing cache"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
    ],
)
def test_generation_that_cannot_start_from_a_cache(options, reason):
    model, batch = build("qwen3"), make_batch("qwen3")
    sample = options.pop("do_sample", True)
    plain = generated(model, batch, sample=sample, **options)
    with share_prompts(model) as report:
        shared = generated(model, batch, sample=sample, **options)
    assert [reason in text for text in report.plain] == [True]
    assert torch.equal(plain, shared)


def test_generation_with_checkpointing_on():
    """Checkpointed layers drop the cache; a model left so generates without it."""
    model, batch = build("qwen3").train(), make_batch("qwen3")
    checkpointed(model)
    with share_prompts(model) as report:
        generated(model, batch, sample=False)
    assert report.plain == {"generate with gradient checkpointing on": 1}


def test_compiled_models_run_plainly(case):
    model, batch = case
    model.model.language_model.norm.compile(backend="eager")
    with torch.no_grad(), share_prompts(model, 12) as report:
        scored(model, batch)
    assert report.plain == {"torch.compile": 1}


def test_a_prompt_learning_adapter_around_the_decoder_alone():
    model = build("qwen2_5_vl")
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION")
    model.model.language_model = get_peft_model(model.model.language_model, config)
    assert "prompt learning" in why_not_share(model, gradients=False)


def test_rotary_embeddings_that_depend_on_the_length_of_the_pass(monkeypatch):
    """The prompt alone is within the length that the model was trained with, prompt and completion are not."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{**BODY, "max_position_embeddings": 36, "rope_parameters": rope})
    model, batch = with_head(randomise(hf.LlamaForCausalLM(config))), make_batch("llama")
    runs_plainly_twice(model, batch, "rotary embeddings of type dynamic")
    monkeypatch.setattr(model_support, "check_rope", nothing)
    goes_wrong(model, batch)


def test_equal_prompts_at_other_positions(monkeypatch):
    """Rotary embeddings are relative, so one row's positions are stretched, not just moved."""
    model, batch = with_head(build("llama")), make_batch("llama")
    positions = torch.arange(batch.inputs["input_ids"].size(1)).repeat(6, 1)
    positions[1] *= 2
    batch.inputs["position_ids"] = positions
    runs_plainly(model, batch, "equal prompts with different position_ids")
    monkeypatch.setattr(prefix_forward, "check_equal_prompts", nothing)
    goes_wrong(model, batch)


def test_linear_attention_that_forgets_the_prompt(monkeypatch):
    """Jamba's state-space layers go on from a state with one token only; with several they forget the prompt."""
    model, batch = with_head(build(OTHERS["jamba"])), make_batch(OTHERS["jamba"])
    runs_plainly_twice(model, batch, "layers of type linear_attention")
    monkeypatch.setattr(model_support, "_LINEAR_FAMILIES", {"jamba"})
    goes_wrong(model, batch)


def test_attention_that_sees_what_comes_later(monkeypatch):
    """An encoder with a head for the next token: its prompt depends on the completion."""
    sizes = {"num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options = {**sizes, "vocab_size": 96, "max_position_embeddings": 512, "attention_type": "original_full"}
    model = randomise(hf.RobertaForCausalLM(hf.RobertaConfig(**options)))
    batch = make_batch("llama")
    with torch.no_grad():
        plain = model(**batch.inputs).logits[:, -13:]
        with share_prompts(model) as report:
            shared = model(**batch.inputs).logits[:, -13:]
        assert report.plain == {"attention that is not causal": 1}
        assert torch.equal(plain, shared)
        monkeypatch.setattr(model_support, "check_causal_attention", nothing)
        with share_prompts(model) as report:
            shared = model(**batch.inputs).logits[:, -13:]
    assert not report.plain
    assert (plain - shared).abs().max() > WRONG


@pytest.mark.parametrize(
    ("name", "padded"),
    [("qwen2_5_vl", False), ("idefics3", False), ("idefics2", True)],
)
def test_pixel_inputs_without_an_image(name, padded):
    """TRL hands them to a micro-batch whose rows have no image, if others of the batch have one."""
    family = FAMILIES.get(name) or OTHERS[name]
    model, batch = with_head(build(family)), make_batch(family, images=(0, 0))
    pixels = make_batch(family).inputs
    empty = {
        key: torch.zeros_like(value) if padded else value[:0] for key, value in pixels.items() if key in PIXEL_INPUTS
    }
    assert len(empty) == len(pixels.keys() & set(PIXEL_INPUTS)) > 0
    with torch.no_grad():
        plain, _ = scored(model, batch)
        batch.inputs |= empty
        with leave_out_empty_images(model):
            tolerated, shared, report = plain_and_shared(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert torch.equal(plain, tolerated)
    assert (plain - shared).abs().max() < 1e-5


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("around", [share_prompts, leave_out_empty_images])
def test_images_in_some_processes_only(images, around):
    """With sharded parameters a vision tower that runs in one process waits for weights from the others for ever."""
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl", images=(images, images))

    def run(theirs):
        votes = [theirs, not theirs]  # of the other process: whether it has images, whether it has none

        def all_agree(mine):
            other = votes.pop(0) if votes else True
            return mine and other

        with torch.no_grad(), around(model, agree=all_agree):
            return scored(model, batch)[0]

    with torch.no_grad():
        assert torch.allclose(run(bool(images)), scored(model, batch)[0], atol=1e-5)
    refused = pytest.raises(DataError, match="unlike that of another process, and the parameters are sharded: give ev")
    with refused:
        run(not images)
    if around is share_prompts:
        with refused, share_prompts(model, agree=lambda mine: False):
            generated(model, batch, sample=False)


def test_a_sampled_video_token_is_a_token_like_any():
    """Without a video nothing stands for it; a model that has not learned yet writes such tokens."""
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl")
    batch.inputs["input_ids"][1, -7] = VIDEO
    plain, shared, report = plain_and_shared(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert (plain - shared).abs().max() < 2e-5


def test_packed_rows_without_a_mask(monkeypatch):
    """Positions that restart begin another sequence, which does not see the one before; behind a cache it does."""
    model, batch = build("llama"), make_batch("llama", images=(1,), text=(33,))
    ids = batch.inputs["input_ids"]
    positions = torch.cat([torch.arange(20), torch.arange(ids.size(1) - 20)]).repeat(len(ids), 1)
    with torch.no_grad():
        plain = model(input_ids=ids, position_ids=positions).logits[:, -13:]
        with share_prompts(model, 12) as report:
            shared = model(input_ids=ids, position_ids=positions).logits[:, -13:]
        assert report.plain == {"position_ids that restart, without an attention mask": 1}
        assert torch.equal(plain, shared)
        alone = torch.arange(ids.size(1)).repeat(len(ids), 1)
        with share_prompts(model, 12) as report:
            counted = model(input_ids=ids, position_ids=alone).logits[:, -13:-1]
        whole = model(input_ids=ids).logits[:, -13:-1]
    assert not report.plain
    assert (counted - whole).abs().max() < 1e-5
    assert (plain[:, :-1] - whole).abs().max() > WRONG


@pytest.mark.parametrize(("name", "completion_length"), [("qwen2_5_vl", 12), ("qwen3_5", None)])
def test_holes_in_the_mask_of_a_completion(name, completion_length):
    """Qwen-VL gives a hole position 0, linear attention leaves it out; behind a cache both would go on counting."""
    model, batch = with_head(build(name)), make_batch(name)
    batch.inputs["attention_mask"][2, -10:-8] = 0
    plain, shared, report = plain_and_shared(model, batch, completion_length)
    assert report.plain == {"holes in the mask of a completion": 1}
    assert (plain - shared).abs().max() < SAME


@pytest.mark.parametrize(
    ("around", "duplicate"),
    [(share_prompts, copy.deepcopy), (leave_out_empty_images, lambda model: pickle.loads(pickle.dumps(model)))],
)
def test_a_copy_made_within_the_block(around, duplicate):
    """An average of the weights, say, runs its own weights, in the block and behind it."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    with around(model):
        average = duplicate(model)
        twice = duplicate(average)
    for other in (average, twice):
        torch.nn.init.zeros_(other.model.language_model.norm.weight)
        torch.nn.init.zeros_(other.lm_head.weight)
    with torch.no_grad():
        for other in (average, twice):
            hidden = other.model(**batch.inputs).last_hidden_state
            assert hidden.abs().max() == 0
            assert torch.equal(generated(other, batch, sample=False), torch.full((6, 12), PAD))
        assert model.model(**batch.inputs).last_hidden_state.abs().max() > 0


@pytest.mark.parametrize(("name", "completion_length"), [("qwen2_5_vl", 12), ("qwen3_5", 12), ("llama", None)])
def test_an_empty_and_a_masked_completion(name, completion_length):
    """TRL masks the completions it has truncated; the others share nevertheless."""
    model, batch = with_head(build(name)), make_batch(name)
    batch.inputs["attention_mask"][[1, 4], -12:] = 0
    batch.inputs["input_ids"][1, -12:] = PAD
    plain, shared, report = plain_and_shared(model, batch, completion_length)
    assert (report.prompts, report.rows, dict(report.plain)) == (2, 6, {})
    assert (plain - shared).abs().max() < (2e-5 if name == "qwen3_5" else 4e-6)


def test_a_row_of_padding_alone():
    model, batch = build("llama"), make_batch("llama")
    batch.inputs["attention_mask"][5] = 0
    with torch.no_grad(), share_prompts(model) as report:
        model(**batch.inputs)
    assert report.plain == {"a row without a token behind its padding and images": 1}
