import pytest
import torch
from support.models import compare
from support.models.families import EOS, build, make_batch
from transformers import CompileConfig, DynamicCache

from vgr_trl.sharing import share_prompts, shared_forward
from vgr_trl.sharing.model_support import cache_name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_tokens_of_a_cache_that_is_outgrown_twice(name, monkeypatch):
    monkeypatch.setattr(shared_forward, "ROOM", 5)
    compare.assert_same_tokens(build(name), make_batch(name), sample=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "sample", "copies"), [("qwen2_5_vl", True, 1), ("internvl", False, 1), ("llama", True, 2)]
)
def test_tokens_of_a_static_cache(name, sample, copies, compiled):
    """Also of a second batch, with shorter prompts; a step is compiled once, and not for each block that shares."""
    model, batch = build(name), make_batch(name)
    options = {"sample": sample, "num_return_sequences": copies, "suppress_tokens": [EOS]}
    if compiled:
        options["compile_config"] = CompileConfig(backend="eager", mode=None, fullgraph=False)
        options["compile_config"]._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for inputs in (batch, make_batch(name, seed=1), batch):
        plain = compare.generated(model, inputs, **options)
        with share_prompts(model) as report:
            shared = compare.generated(model, inputs, **options, cache_implementation="static")
        assert (report.prompts, report.rows, report.plain) == (2, 6 * copies, {})
        assert torch.equal(plain, shared)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2]
    assert (graphs[0] > 0) == compiled


def test_a_model_whose_own_options_name_a_static_cache():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    plain = compare.generated(model, batch, sample=False)
    model.generation_config.cache_implementation = "static"
    with share_prompts(model) as report:
        assert torch.equal(compare.generated(model, batch, sample=False), plain)
    assert (report.prompts, report.rows, report.plain) == (2, 6, {})


def test_a_cache_of_the_caller_is_filled_and_no_prompt_is_shared():
    model, batch = build("llama"), make_batch("llama")
    cache = DynamicCache(config=model.config)
    with share_prompts(model) as report:
        compare.generated(model, batch, sample=False, **{cache_name(model.model): cache})
    assert report.plain == {"generate from a cache or from embeddings": 1}
    assert cache.get_seq_length() >= batch.inputs["input_ids"].size(1) - batch.completion_length
