import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "with_verl" / "parts"))
from tiny_rollout import chats, picture, rollout, tiny_model

from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.integrations.verl import build_token_vgr_weights_for_batch, token_vgr_weights
from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.integrations.verl.signals import build_actor_context, measure_pass, normalised_black, perturb_row
from vgr_trl.signals import RolloutScorer
from vgr_trl.signals.ratios import special_token_ids


@pytest.fixture(scope="module")
def tiny():
    model, processor = tiny_model()
    return model.eval(), processor, *rollout(model, processor)


def test_packed_and_padded_agree(tiny, monkeypatch):
    model, processor, tensors, pixels = tiny
    options = SignalOptions(token_weights=True, token_weights_last_k_layers=1)
    images = {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}
    ids, present = tensors["input_ids"], tensors["attention_mask"].bool()
    prompt = present & (torch.arange(ids.size(1)) < tensors["prompts"].size(1))
    queries, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, attend.__name__, lambda query, *a, **k: queries.append(query.size(2)) or attend(query, *a, **k)
    )
    given = model, ids, present, prompt, build_actor_context(options, 0, processor)
    with torch.no_grad(), measure_pass(*given, packed=False) as padded:
        model(
            input_ids=ids, attention_mask=present.long(), position_ids=tensors["position_ids"].transpose(0, 1), **images
        )

    assert tensors["responses"].size(1) in queries, "measured again for the tokens that emit responses, and no others"
    positions, end = tensors["position_ids"].transpose(0, 1)[:, present], torch.arange(3).expand(4, -1)  # (4, total)
    tokens = functional.pad(ids[present], (0, 3))[None]
    with torch.no_grad(), measure_pass(*given, packed=True, pad=3) as packed:
        model(input_ids=tokens, position_ids=torch.cat([positions, end], 1)[:, None], use_cache=False, **images)
    emitting = (present & ~prompt).roll(-1, 1)  # what stands at a position belongs to the next token
    assert emitting.sum() == tensors["response_mask"].sum()
    for name in ("vgr_vision", "vgr_instruction", "vgr_token"):
        assert torch.allclose(packed[name][emitting[present]], padded[name][emitting[present]], atol=1e-6), name
    assert padded["vgr_vision"][emitting[present]].std() > 1e-3


def test_matrices_of_generate_give_what_a_probe_gives():
    model, processor = tiny_model()
    model.eval().get_decoder().config._attn_implementation = "eager"
    prompts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats(2)]
    processor.tokenizer.padding_side = "left"
    inputs = dict(processor(text=prompts, images=[[picture(0)], [picture(1)]], return_tensors="pt", padding=True))
    eos = processor.tokenizer.eos_token_id
    of_images = set(processor.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))) - {eos}
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=6, do_sample=True, temperature=5.0, num_return_sequences=3,
            output_attentions=True, return_dict_in_generate=True, suppress_tokens=[*of_images],
        )  # fmt: skip
    prompt, rows = inputs["input_ids"].size(1), [0, 0, 0, 1, 1, 1]
    weights, info = build_token_vgr_weights_for_batch(
        out.attentions, inputs["input_ids"], out.sequences, processor, inputs["image_grid_thw"], last_k_layers=2
    )
    completions = out.sequences[:, prompt:]
    lengths = [row.tolist().index(eos) + 1 if eos in row else len(row) for row in completions]
    mask = torch.arange(completions.size(1)) < torch.tensor(lengths).unsqueeze(1)
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    patches = inputs["pixel_values"].view(2, -1, inputs["pixel_values"].size(1))[rows].flatten(0, 1)
    signals = scorer.score(
        inputs["input_ids"][rows], inputs["attention_mask"][rows], completions, mask.long(), num_generations=3,
        pixel_values=patches, image_grid_thw=inputs["image_grid_thw"][rows],
        **{name: inputs[name][rows] for name in inputs if name == "mm_token_type_ids"},
    )  # fmt: skip
    measured, other = token_vgr_weights(signals.attention, last_k_layers=2)
    assert info["layers"] == other["layers"] == [2, 3]
    assert torch.allclose(weights[mask], measured[mask], atol=1e-4)
    assert torch.allclose(info["vgr"], other["vgr"], rtol=1e-4)
    assert torch.allclose((weights * mask).sum(1) / mask.sum(1), torch.ones(6), atol=1e-5)
    assert float(weights[mask].std()) > 1e-3
    assert not torch.allclose(weights[mask], token_vgr_weights(signals.attention, last_k_layers=1)[0][mask])
    first = build_token_vgr_weights_for_batch(
        out.attentions[:1], inputs["input_ids"], out.sequences[:, : prompt + 1], processor
    )
    assert first[0].tolist() == [[1.0]] * 6, "of one token"


def test_perturbed_pixels_depend_on_the_image_the_step_and_the_seed(tiny):
    _, processor, _, pixels = tiny
    black = normalised_black(processor)
    options = SignalOptions(black_prob=0.5, seed=1)
    first, same, other = (perturb_row(pixels[row], options, 7, black)["pixel_values"] for row in (0, 1, 2))
    assert torch.equal(first, same)  # completions of one prompt
    assert not torch.equal(first == pixels[0]["pixel_values"], other == pixels[2]["pixel_values"])
    later = perturb_row(pixels[0], options, 8, black)["pixel_values"]
    assert not torch.equal(first, later)
    dark = (first != pixels[0]["pixel_values"]).any(1)
    assert 0 < dark.sum() < len(dark)
    value = torch.tensor(black).repeat_interleave(first.size(1) // 3)
    assert torch.allclose(first[dark], value.expand(int(dark.sum()), -1))


def test_pixels_of_whole_images():
    image = torch.arange(2 * 3 * 30 * 20.0).view(2, 3, 30, 20) + 1
    dark = perturb_row({"pixel_values": image}, SignalOptions(), 0, [0.0, -1.0, -2.0])["pixel_values"]
    changed = (dark != image).any(1)  # (2, 30, 20)
    for square in (changed[:, :14, :14], changed[:, 14:28, :14], changed[:, 28:, 14:]):
        assert all(each.all() or not each.any() for each in square)
    assert changed.any()
    assert (dark[:, 1][changed] == -1).all()
