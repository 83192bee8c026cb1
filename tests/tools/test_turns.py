import re
from functools import partial

import pytest
import torch
from support.tool_runs import DAPO, STOCK, call, deal_turns
from support.trainers import begin, tiny_model

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.reporting.records import read_run
from vgr_trl.signals.ratios import token_vision_gain_ratio

REFUSED = [
    {"signals": ["region_share"]}, {"attention_source": "generate", "compute_attention_metrics": True},
    {"enable_perception_filtering": True, "perturbation": "remove_image"},
]  # fmt: skip


def rollout_of(trainer, rows=8):
    with trainer.new_rollout(begin(trainer, rows)) as rollout:
        trainer.generate_and_score(rollout)
    return rollout


def test_three_turns_by_hand(make, model_folder):
    per_image = []

    def reward(completions, attention_per_image, **kwargs):
        per_image.extend(attention_per_image)
        return [0.0] * len(completions)

    trainer = make(reward, signals=["similarity"])
    rollout = rollout_of(trainer)
    signals, batch, row = rollout.signals, rollout.batch, 2
    prompt, length, inputs = batch.width, batch.length, batch.model_inputs
    ids = inputs["input_ids"][row].tolist()
    tokenizer = trainer.processing_class.tokenizer
    first, second = (f"{call('look', wide=wide)}<|im_end|>the circle is " for wide in (56, 112))
    written = tokenizer.decode(batch.completion_ids[row][signals.mask[row]])
    assert written == f"green {first}{second}<answer>C</answer><|im_end|>"
    own = [False] * prompt + signals.mask[row].tolist()
    special, image = set(tokenizer.all_special_ids), tokenizer.convert_tokens_to_ids("<|image_pad|>")
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    vision = [token == image for token in ids]
    attended = inputs["attention_mask"][row].bool().tolist()
    text = [there and not mine and token not in special for there, mine, token in zip(attended, own, ids, strict=True)]
    mass = signals.attention
    looks = [sum(vision[prompt:at]) for at in range(prompt, prompt + length)]
    assert {4, 12} <= set(looks), "56 and 112 pixels wide: 4 and 8 tokens"
    assert mass.seen_vision[row].tolist() == [sum(vision[: prompt + at]) for at in range(length)]
    assert mass.seen_instruction[row].tolist() == [sum(text[: prompt + at]) for at in range(length)]

    model = tiny_model(model_folder)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
    late = outputs.attentions[2][row].mean(0)  # (S, S); the late third of three layers is the last
    queries = [prompt + at - 1 for at in range(length) if own[prompt + at]]
    to_image, to_text = (late[queries][:, torch.tensor(keys)].sum(1) for keys in (vision, text))
    seen_images, seen_text = (
        torch.tensor([sum(keys[: query + 1]) for query in queries], dtype=torch.float) for keys in (vision, text)
    )
    per_token = (to_text / seen_text) / (to_image / seen_images)
    expected = (to_text / seen_text).mean() / (to_image / seen_images).mean()
    columns = trainer._logs["extra"]["vgr"]
    assert columns[row] == pytest.approx(expected.item(), rel=1e-4)
    found = token_vision_gain_ratio(mass, [2])[row]
    assert found[[query - prompt + 1 for query in queries]].tolist() == pytest.approx(per_token.tolist(), rel=1e-4)
    assert found.isnan().sum() == length - len(queries)

    states = torch.nn.functional.normalize(outputs.hidden_states[-1][row], dim=-1)
    largest = [max((states[query] @ states[at]).item() for at in range(query + 1) if vision[at]) for query in queries]
    assert signals.extra["similarity"][row][signals.mask[row]].tolist() == pytest.approx(largest, abs=1e-5)

    assert [len(of_row) for of_row in per_image] == [1, 2, 3, 2] * 2
    places = torch.tensor(vision).nonzero().flatten()
    for part, value in zip(places.split([len(places) - 12, 4, 8]), per_image[row], strict=True):
        later = [query for query in queries if query > part[-1]]  # the mean over the tokens that come after the image
        assert value == pytest.approx(late[later][:, part].sum(1).mean().item(), rel=1e-4)


def test_image_tokens_without_an_image_are_refused(make):
    deal = partial(deal_turns, turns=(0, 0, 1, 0), asked=lambda place, turn: f"<|image_pad|>{call('look', wide=56)}")
    stock = make(kind=STOCK, deal=deal, **DAPO)
    assert "pixel_values" not in stock._generate_and_score_completions(begin(stock))
    ours = make(compute_attention_metrics=False, deal=deal)
    name = begin(ours)[2]["id"]
    images = r"has (\d+) image tokens with its completion, but its 2 images take (\d+): use a chat template"
    with pytest.raises(DataError, match=f"The row with the id {name!r} {images}") as raised:
        ours._generate_and_score_completions(begin(ours))
    found, takes = map(int, re.search(images, str(raised.value)).groups())
    assert found == takes + 1


def test_a_video_token_that_the_policy_writes_is_a_token_like_others(make):
    """Nothing in a row is a video, but TRL marks the token as one, and the model asks for its pixels."""
    deal = partial(deal_turns, asked=lambda place, turn: f"<|video_pad|>{call('look', wide=56)}")
    trainer = make(compute_attention_metrics=False, deal=deal)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_what_is_refused(make, vision_trainer):
    for changed in REFUSED:
        with pytest.raises(ConfigError):
            make(**changed)
    with pytest.raises(ConfigError):
        vision_trainer(enable_perception_filtering=True, perturb_images="tools")


def test_returned_images_are_recorded_with_the_attention_on_them(make, tmp_path):
    trainer = make(
        rollout_log_steps=1, rollout_log_samples=8, enable_perception_filtering=True, perturbation="mask_image"
    )
    trainer.train()
    (record,) = read_run(tmp_path / "run").records("train")
    assert [len(each.images) for each in record.completions] == [1, 2, 3, 2] * 2
    assert len({each.question for each in record.completions}) == 2, "the questions of two prompts"
    third = record.completions[2]
    assert [(image.width, image.grid) for image in third.images[1:]] == [(56, [2, 2]), (112, [2, 4])]
    assert len({image.file for image in third.images}) == 3
    assert None not in {image.perturbed for image in third.images}
    assert third.tokens.count("<image>") == 2
    assert "<|image_pad|>" not in third.tokens
    assert "a circle is teal" in third.text
    cells = sum(rows * columns for rows, columns in (image.grid for image in third.images))
    assert len(third.attention.values) == cells * len(third.attention.scale) == cells * len(third.tokens)
    assert [turn.calls for turn in third.turns] == [["look(wide=56)"], ["look(wide=112)"], []]
    assert [(turn.answers, turn.images) for turn in third.turns] == [(["<image>a circle is teal"], 1)] * 2 + [([], 0)]
    written = ["".join(third.tokens[turn.start : turn.stop]) for turn in third.turns]
    assert [text.count("<tool_call>") for text in written] == [1, 1, 0]
    assert [text.count("<|im_end|>") for text in written] == [1, 1, 1]
    assert not any("im_start" in text or "<image>" in text for text in written)
    late = len(third.tokens) - 2
    attention = list(third.attention.values[late * cells : (late + 1) * cells])
    assert any(attention[-12:]), "the last token sees the images of tools"
    assert not any(third.attention.values[cells - 12 : cells]), "the first token sees none of them"
