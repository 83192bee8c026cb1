"""Token weights of a batch: from matrices of generate, from a probe, from what a reward returns."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "with_verl" / "parts"))
from tiny_rollout import tiny_model

from vgr_trl.credit import stack_weights
from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.integrations.verl import build_token_vgr_weights_for_batch, token_vgr_weights
from vgr_trl.signals import RolloutScorer
from vgr_trl.signals.ratios import special_token_ids
from vgr_trl.utils import DataError


def of_images(processor):
    """Tokens that stand for parts of an image, which no completion may have."""
    return [*set(processor.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))) - {processor.tokenizer.eos_token_id}]


@pytest.fixture(scope="module")
def generated():
    model, processor = tiny_model()
    model.eval()
    model.get_decoder().config._attn_implementation = "eager"
    texts = ["what colour is this", "what is red"]
    chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}] for text in texts]
    prompts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    images = [[Image.new("RGB", (56, 56), colour)] for colour in ("red", "blue")]
    processor.tokenizer.padding_side = "left"
    inputs = dict(processor(text=prompts, images=images, return_tensors="pt", padding=True))
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=6, do_sample=True, temperature=5.0, num_return_sequences=3,
            output_attentions=True, return_dict_in_generate=True, suppress_tokens=of_images(processor),
        )  # fmt: skip
    return model, processor, inputs, out


def test_matrices_give_what_a_probe_gives(generated):
    model, processor, inputs, out = generated
    prompt, rows = inputs["input_ids"].size(1), [0, 0, 0, 1, 1, 1]
    weights, info = build_token_vgr_weights_for_batch(
        out.attentions, inputs["input_ids"], out.sequences, processor, inputs["image_grid_thw"], last_k_layers=2
    )
    completions = out.sequences[:, prompt:]
    eos = processor.tokenizer.eos_token_id
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


def test_lists_and_tensors_are_padded_or_cut_with_a_warning():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stack_weights([[1.0, 2.0, 3.0], [4.0, 5.0]], mask).tolist() == [[1, 2, 3], [4, 5, 1]]
        assert stack_weights(torch.full((2, 3), 2.0), mask).tolist() == [[2, 2, 2], [2, 2, 2]]
    with pytest.warns(UserWarning, match="padded with 1 or cut to the 3 tokens"):
        assert stack_weights([[1.0, 2.0], torch.arange(5.0)], mask).tolist() == [[1, 2, 1], [0, 1, 2]]
    with pytest.raises(DataError, match="give numbers, one for each token"):
        stack_weights([["much"], None], mask)
