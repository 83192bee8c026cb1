"""What would be wrong without a message runs plainly."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import compare
from support.models.families import FAMILIES, OPEN, OTHERS, PAD, PIXEL_INPUTS, VIDEO, build, make_batch

from vgr_trl.errors import DataError
from vgr_trl.sharing import ignore_empty_images, share_prompts, why_not_share
from vgr_trl.sharing.model_support import UnsupportedModel, causal_model
from vgr_trl.sharing.prefix_split import check_inputs, find_split

SAME = 1e-6  # a plain pass, whose head scores fewer columns
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
OVER_TWO = {"model.layers.0": 0, "model.layers.1": 1}  # as `device_map="auto"` leaves it where there are two GPUs
CONFIG = build("qwen2_5_vl").config


def case(name):
    family = FAMILIES.get(name) or OTHERS[name]
    return compare.with_head(build(family)), make_batch(family)


def stretch_positions(model, inputs):
    """Rotary embeddings are relative, so one row's positions are stretched, not just moved."""
    inputs["position_ids"] = torch.arange(inputs["input_ids"].size(1)).repeat(6, 1)
    inputs["position_ids"][1] *= 2


def open_types(model, inputs):
    """In PaliGemma all tokens of type 0 see each other, so the last token of a prompt changes the others."""
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    inputs["token_type_ids"][:, -12:] = 1


def pickled(model):
    return pickle.loads(pickle.dumps(model))


GUARDS = [  # what changes in a model or in its batch, length of completions, how the reason begins
    ("llama", lambda model, _: setattr(model.config, "rope_parameters", DYNAMIC), 12, "rotary embeddings of type dyn"),
    ("llama", stretch_positions, 12, "equal prompts with different position_ids"),
    # Ovis2 embeds it as text where the pass has no images, as behind a shared prompt.
    ("ovis2", lambda _, inputs: inputs["input_ids"][0, -9].fill_(OPEN), 12, "tokens whose embeddings depend on"),
    # Qwen-VL gives a hole position 0, linear attention leaves it out; behind a cache both would go on counting.
    ("qwen2_5_vl", lambda _, inputs: inputs["attention_mask"][2, -10:-8].zero_(), 12, "holes in the mask"),
    ("qwen3_5", lambda _, inputs: inputs["attention_mask"][2, -10:-8].zero_(), None, "holes in the mask"),
    ("llama", lambda _, inputs: inputs["attention_mask"][5].zero_(), None, "prompts that are not padded on the left"),
    ("qwen2_5_vl", lambda model, _: model.model.language_model.layers[1].compile(backend="eager"), 12, "torch.compile"),
    ("qwen2_5_vl", lambda model, _: setattr(model, "hf_device_map", OVER_TWO), 12, "a model spread over several dev"),
    ("paligemma", open_types, 12, "bidirectional attention over text"),
]


@pytest.mark.parametrize(("name", "change", "length", "beginning"), GUARDS, ids=[reason for *_, reason in GUARDS])
def test_what_would_be_wrong_runs_plainly(name, change, length, beginning):
    model, batch = case(name)
    change(model, batch.inputs)
    plain, shared, report = compare.plain_and_shared(model, batch, length)
    ((reason, calls),) = report.plain.items()
    assert reason.startswith(beginning)
    assert calls == 1
    assert (plain - shared).abs().max() < SAME


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_reentrant_checkpointing(name, adapter):
    """TRL forces it for adapters under ZeRO-3."""
    model, batch = case(name)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "up_proj"]))
    model = model.double().train()
    batch.inputs["pixel_values"] = batch.inputs["pixel_values"].double()
    exact = compare.gradients(model, batch)
    compare.checkpointed(causal_model(model), {"use_reentrant": True})
    model.enable_input_require_grads()
    for length in (12, None):
        with share_prompts(model, length) as report:
            found = compare.gradients(model, batch)
        assert compare.largest_relative(exact, found) < (1e-4 if name == "qwen3_5" else 1e-6)
        compare.assert_shared_by(report, 2, 6, causal_model(model))


def test_attention_that_does_not_read_the_layout(monkeypatch):
    """A layer that drops further arguments would let all tokens of the row see each other."""
    model, batch = case("qwen2_5_vl")
    layer = model.model.language_model.layers[1].self_attn
    plain, attend = compare.gradients(model, batch), layer.forward

    def drop(*args, shared_row=None, **kwargs):
        return attend(*args, **kwargs)

    assert why_not_share(model) is None
    monkeypatch.setattr(layer, "forward", drop)
    with share_prompts(model, 12) as report:
        assert compare.largest_relative(plain, compare.gradients(model, batch)) < SAME
    assert report.plain == {"a model that does not hand the layout of a row on to all of its layers": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2, "sample": False}, "generate with beams or an assistant"),
        ({"use_cache": False}, "generate without a growing or a static cache"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
    ],
)
def test_generation_that_cannot_start_from_a_cache(options, reason):
    model, batch = build("qwen3"), make_batch("qwen3")
    options = {"sample": True, **options}
    plain = compare.generated(model, batch, **options)
    with share_prompts(model) as report:
        shared = compare.generated(model, batch, **options)
    assert report.plain == {reason: 1}
    assert torch.equal(plain, shared)


@pytest.mark.parametrize(("name", "padded"), [("qwen2_5_vl", False), ("idefics2", True)])
def test_pixel_inputs_without_an_image(name, padded):
    """TRL hands them to a micro-batch whose rows have no image, if others of the batch have one."""
    family = FAMILIES.get(name) or OTHERS[name]
    model, batch = compare.with_head(build(family)), make_batch(family, images=(0, 0))
    pixels = {key: value for key, value in make_batch(family).inputs.items() if key in PIXEL_INPUTS}
    with torch.no_grad():
        plain, _ = compare.scored(model, batch)
        batch.inputs |= {key: torch.zeros_like(value) if padded else value[:0] for key, value in pixels.items()}
        with ignore_empty_images(model):
            without, shared, report = compare.plain_and_shared(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert torch.equal(plain, without)
    assert (plain - shared).abs().max() < 1e-5


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("around", [share_prompts, ignore_empty_images])
def test_images_in_some_processes_only(images, around):
    """With sharded parameters a vision tower that runs in one process waits for weights from the others for ever."""
    model, batch = compare.with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl", images=(images, images))

    def run(theirs):
        votes = [theirs, not theirs]  # of the other process: whether it has images, whether it has none

        def all_agree(mine):
            other = votes.pop(0) if votes else True
            return mine and other

        with torch.no_grad(), around(model, agree=all_agree):
            return compare.scored(model, batch)[0]

    with torch.no_grad():
        assert torch.allclose(run(bool(images)), compare.scored(model, batch)[0], atol=1e-5)
    refused = pytest.raises(DataError, match="unlike a batch of another process, and the parameters are sharded")
    with refused:
        run(not images)
    if around is share_prompts:
        with refused, share_prompts(model, agree=lambda mine: False):
            compare.generated(model, batch, sample=False)


def test_packed_rows_without_a_mask():
    """Positions that restart begin another sequence, which does not see the one before; behind a cache it does."""
    model, batch = build("llama"), make_batch("llama", images=(1,), text=(33,))
    ids = batch.inputs["input_ids"]
    counted = torch.arange(ids.size(1)).repeat(len(ids), 1)
    restarting = torch.where(counted < 20, counted, counted - 20)
    with torch.no_grad(), share_prompts(model, 12) as report:
        model(input_ids=ids, position_ids=restarting)
        model(input_ids=ids, position_ids=counted)
    assert report.plain == {"position_ids that restart, without an attention mask": 1}


@pytest.mark.parametrize(
    ("around", "duplicate"),
    [(share_prompts, copy.deepcopy), (share_prompts, pickled), (ignore_empty_images, pickled)],
)
def test_a_copy_made_within_the_block(around, duplicate):
    """An average of the weights, say, runs its own weights, in the block and behind it."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    with around(model):
        twice = duplicate(duplicate(model))
    torch.nn.init.zeros_(twice.model.language_model.norm.weight)
    torch.nn.init.zeros_(twice.lm_head.weight)
    with torch.no_grad():
        assert twice.model(**batch.inputs).last_hidden_state.abs().max() == 0
        assert torch.equal(compare.generated(twice, batch, sample=False), torch.full((6, 12), PAD))
        assert model.model(**batch.inputs).last_hidden_state.abs().max() > 0


@pytest.mark.parametrize(("name", "length"), [("qwen3_5", 12), ("llama", None), ("qwen2_5_vl", 12)])
def test_what_is_shared_nevertheless(name, length):
    """An empty completion, one that TRL masks, and the token of a video, which a model can sample without one."""
    model, batch = case(name)
    batch.inputs["attention_mask"][[1, 4], -12:] = 0
    batch.inputs["input_ids"][1, -12:] = PAD
    batch.inputs["input_ids"][2, -7] = VIDEO
    plain, shared, report = compare.plain_and_shared(model, batch, length)
    assert (report.prompts, report.rows, dict(report.plain)) == (2, 6, {})
    assert (plain - shared).abs().max() < (4e-6 if name == "llama" else 2e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_without_attention():
    model, batch = case("qwen2_5_vl")
    plain = compare.gradients(model, batch)
    model.model.language_model.layers[0].mlp.compile(backend="eager")
    with share_prompts(model, 12) as report:
        assert compare.largest_relative(plain, compare.gradients(model, batch)) < 1e-4
    assert report.prompts_per_row == 1 / 3


def test_threads_share_alike():
    """The model keeps the offsets behind the images of one batch, which rows must not read."""
    model = compare.with_head(build("qwen2_vl"))
    batches, both = [make_batch("qwen2_vl", images=(1, 3)), make_batch("qwen2_vl", images=(4, 0))], Barrier(2)

    def score(batch):
        with torch.no_grad():
            return compare.scored(model, batch)[0]

    def together(batch):
        both.wait()
        return score(batch)

    expected = [score(batch) for batch in batches]
    with share_prompts(model, 12), ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            shared = list(pool.map(together, batches))
            assert all((one - other).abs().max() < 4e-6 for one, other in zip(expected, shared, strict=True))


def test_inputs_that_cannot_be_split():
    ids = torch.tensor([[10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    for name, value, columns in (("mm_token_type_ids", 1, (3, 5)), ("attention_mask", 0, (2, 3))):
        for column in columns:
            with pytest.raises(UnsupportedModel):
                find_split(inputs | {name: inputs[name].index_fill(1, torch.tensor(column), value)}, CONFIG, 3)
    for asked in ({"return_dict": False}, {"output_attentions": True}):
        with pytest.raises(UnsupportedModel, match=next(iter(asked))):
            check_inputs(inputs | asked, CONFIG)
