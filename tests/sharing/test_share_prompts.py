import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate.state import GradientState
from peft import LoraConfig, get_peft_model
from support.models.compare import gradients, largest_relative, scored, with_head
from support.models.families import FAMILIES, IMAGE, PAD, build, make_batch, randomise, text_model

from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import cache_name, causal_model, has_active_dropout

LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}


def with_adapter(name, **options):
    torch.manual_seed(2)
    model = get_peft_model(build(name), LoraConfig(**LORA, target_modules=list(FAMILIES[name].lora), **options))
    for parameter, value in model.named_parameters():
        if "magnitude" in parameter:  # DoRA starts where LoRA does
            value.data = value.data * (1 + torch.rand_like(value))
    with_head(causal_model(model))
    return model.eval()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_training_loop_with_a_loss_on_every_token(name):
    """Prompts whose length is not given keep all outputs but those of padding, and gradients through them."""
    plain, batch = build(name).train(), make_batch(name)
    labels = batch.inputs["input_ids"].masked_fill(batch.inputs["input_ids"] == IMAGE, PAD)
    emits = torch.nn.functional.pad(batch.inputs["attention_mask"], (1, 0))[:, :-1] * batch.inputs["attention_mask"]
    labels = labels.masked_fill(emits == 0, -100)
    ours = copy.deepcopy(plain)
    plain(**batch.inputs, labels=labels, num_items_in_batch=torch.tensor(200)).loss.backward()
    with share_prompts(ours) as report:
        ours(**batch.inputs, labels=labels, num_items_in_batch=torch.tensor(200)).loss.backward()
    assert report.prompts_per_row == 1 / 3
    theirs, mine = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (plain, ours))
    assert largest_relative(theirs, mine) < 2e-5


@pytest.mark.parametrize(
    ("name", "options"), [("qwen2_5_vl", {}), ("qwen3_5", {"use_dora": True}), ("llava", {"lora_dropout": 0.5})]
)
def test_adapters(name, options):
    model, batch = with_adapter(name, **options), make_batch(name)
    plain = gradients(model, batch)
    with share_prompts(model, batch.completion_length) as report:
        shared = gradients(model, batch)
    assert not report.plain
    assert set(plain) == {parameter for parameter in plain if "lora_" in parameter}
    assert largest_relative(plain, shared) < (2e-4 if name == "qwen3_5" else 1e-5)


def test_rows_with_adapters_of_their_own_run_plainly():
    model, batch = with_adapter("qwen2_vl"), make_batch("qwen2_vl")
    model.add_adapter("other", LoraConfig(**LORA, target_modules=["k_proj", "up_proj"]))
    names = {"adapter_names": ["default", "other"] * 3}

    def run():
        tokens = model.generate(**batch.inputs, **names, max_new_tokens=3, do_sample=False)
        return tokens, model(**batch.inputs, **names).logits

    with torch.no_grad():
        plain = run()
        with share_prompts(model) as report:
            assert all(map(torch.equal, plain, run()))
            assert sum(report.plain.values()) == 2
            model(**batch.inputs, use_cache=False)
    assert report.prompts_per_row < 1


def test_policy_and_reference_do_not_share_a_prefix():
    """The reference is the same model with its adapter off, or another adapter: its prompts are computed again."""
    model, batch = with_adapter("qwen2_vl"), make_batch("qwen2_vl")
    model.add_adapter("other", LoraConfig(**LORA, target_modules=["k_proj", "up_proj"]))

    def three_policies():
        policy, _ = scored(model, batch)
        with model.disable_adapter():
            reference, _ = scored(model, batch)
        model.set_adapter("other")
        other, _ = scored(model, batch)
        model.set_adapter("default")
        return torch.stack([policy, reference, other])

    with torch.no_grad():
        plain = three_policies()
        with share_prompts(model, batch.completion_length) as report:
            shared = three_policies()
    assert report.prompts_per_row == 1 / 3
    assert (plain - shared).abs().max() < 4e-6
    assert (plain[0] - plain[1]).abs().max() > 0.1
    assert (plain[1] - plain[2]).abs().max() > 0.1


def reference_with_gradients(model, batch, number):
    with model.disable_adapter():
        reference, _ = scored(model, batch)
    return scored(model, batch)[0] - reference


def alternating_adapters(model, batch, number):
    model.set_adapter(["default", "other"][number % 2])
    return scored(model, batch)[0]


@pytest.mark.parametrize("forward", [reference_with_gradients, alternating_adapters])
def test_adapters_that_change_between_micro_batches_of_an_optimizer_step(forward):
    """Three micro-batches hold one completion of each prompt."""
    model, batch = with_adapter("llama"), make_batch("llama")
    model.add_adapter("other", LoraConfig(**LORA, target_modules=["k_proj", "up_proj"]))
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or "layernorm" in name)  # the reference has gradients, too

    def step():
        model.zero_grad()
        logps = []
        for number in range(3):
            GradientState()._set_sync_gradients(number == 2)
            part = replace(batch, inputs={name: value[number::3] for name, value in batch.inputs.items()})
            logps.append(forward(model, part, number))
            logps[-1].square().sum().backward()
        model.set_adapter("default")
        return torch.cat(logps), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain_logps, plain = step()
    with share_prompts(model):
        logps, shared = step()
    torch.testing.assert_close(logps, plain_logps, rtol=0, atol=1e-5)
    assert plain.keys() == shared.keys()
    assert largest_relative(plain, shared) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}, True),
        ("OPT", {"dropout": 0.0, "layerdrop": 0.5, "ffn_dim": 48}, True),
        ("OPT", {"dropout": 0.0, "ffn_dim": 48}, False),
    ],
)
def test_active_dropout(kind, options, expected):
    model = randomise(text_model(kind, **options)()).train()
    ids = make_batch("llama").inputs["input_ids"]
    torch.manual_seed(0)
    with torch.no_grad():
        differ = any(not torch.equal(model(ids).logits, model(ids).logits) for _ in range(5))
    assert has_active_dropout(model) == differ == expected
    assert not has_active_dropout(model.eval())


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_far_from_float32_as_the_plain_pass(autocast):
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl", generations=6)
    with torch.no_grad():
        exact, _ = scored(model, batch)
        if not autocast:
            model.to(torch.bfloat16)
            batch.inputs["pixel_values"] = batch.inputs["pixel_values"].to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plain, _ = scored(model, batch)
            with share_prompts(model, batch.completion_length) as report:
                shared, _ = scored(model, batch)
    assert not report.plain
    far = (plain.float() - exact).abs().mean()
    assert 1e-4 < (shared.float() - exact).abs().mean() < 1.5 * far


def test_a_call_of_the_base_model_behind_a_scored_pass_keeps_all_hidden_states():
    """TRL's labels say where completions begin for their own pass only, also for one that fails."""
    model, batch = with_head(build("llama")), make_batch("llama")
    plain = model.model(**batch.inputs).last_hidden_state
    hidden = []
    with share_prompts(model) as report:
        scored(model, batch)
        hidden.append(model.model(**batch.inputs, use_cache=False).last_hidden_state)
        with model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            scored(model, batch)
        hidden.append(model.model(**batch.inputs, use_cache=False).last_hidden_state)
    assert not report.plain
    seen = batch.inputs["attention_mask"].bool()
    assert max((plain - each)[seen].abs().max() for each in hidden) < 4e-6


def test_blocks_can_be_nested_and_end_with_errors():
    model, batch = with_head(build("qwen2_vl")), make_batch("qwen2_vl")
    patched = model.forward
    with torch.no_grad(), share_prompts(model) as outer:
        with pytest.raises(ZeroDivisionError), share_prompts(model, 12):
            1 / 0  # noqa: B018
        with share_prompts(model, batch.completion_length) as inner:
            scored(model, batch)
    assert (inner.prompts, outer.prompts) == (2, 0)
    assert model.forward == patched
    assert "forward" not in vars(model.model)


def test_a_pass_that_wants_a_cache_gets_it():
    model, batch = build("llama"), make_batch("llama")
    with torch.no_grad(), share_prompts(model) as report:
        outputs = model(**batch.inputs, use_cache=True)
    assert outputs.past_key_values.get_seq_length() == batch.inputs["input_ids"].size(1)
    assert len(outputs.past_key_values.layers[0].keys) == 6
    assert report.rows == 0


@pytest.mark.parametrize("gradients", [False, True])
def test_a_loop_that_decodes_from_the_cache_it_gets_by_default(gradients):
    model, batch = build("llama"), make_batch("llama")
    with torch.set_grad_enabled(gradients):
        plain = decode_twice(model, **batch.prompt_inputs())
        with share_prompts(model):
            shared = decode_twice(model, **batch.prompt_inputs())
    torch.testing.assert_close(shared, plain)


def decode_twice(model, input_ids, attention_mask):
    """Logits of the next two tokens, greedily."""
    first = model(input_ids, attention_mask)
    token = first.logits[:, -1:].argmax(-1)
    mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
    second = model(token, mask, **{cache_name(model.model): first.past_key_values})
    return torch.cat([first.logits[:, -1], second.logits[:, -1]])


def test_generation_returns_the_attention_of_all_prompts():
    model, batch = build("llama"), make_batch("llama")
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    plain = model.generate(**batch.prompt_inputs(), **options)
    with share_prompts(model):
        shared = model.generate(**batch.prompt_inputs(), **options)
    torch.testing.assert_close(shared.attentions, plain.attentions)


def test_a_model_that_samples_by_itself_draws_the_same_numbers():
    """The pass over the prompts draws none, whatever the model's own generation config says."""
    model, batch = build("llama"), make_batch("llama")
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5)
    tokens = []
    for shares in (False, True):
        torch.manual_seed(3)
        with share_prompts(model) if shares else nullcontext() as report:
            tokens.append(model.generate(**batch.prompt_inputs(), max_new_tokens=5))
    assert report.prompts == 2
    assert torch.equal(*tokens)
