"""The dependency under several perturbations: one pass, and what each of them alone gives."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from support.trainers import letters_reward, logged

from vgr_trl import registries
from vgr_trl.config import PerturbationOptions
from vgr_trl.measure import score_perturbed
from vgr_trl.registries import declares
from vgr_trl.signals.named import RolloutSignals, add_named, columns_of_signals, named_signals, signals_of_columns
from vgr_trl.utils import ConfigError

VIEWS = ("mask_image", "gaussian_blur", "blacken_patches")


def test_each_view_alone_and_all_at_once(vision_trainer, monkeypatch):
    """Within one rollout, mean and minimum of what three runs of the pass give, each with one perturbation."""
    views = {"perturbation": VIEWS[0], "further_perturbations": list(VIEWS[1:])}
    run = vision_trainer(max_completion_length=4, max_steps=1, credit_rules=["trajectory_scale"], **views)
    options, found, passes, scored = run.args, {}, [], run.score

    def score(inputs, *args, **options):
        passes.append(len(inputs["input_ids"]))
        return scored(inputs, *args, **options)

    def measured(trainer, rollout):
        measurement = trainer.measurement
        for name in VIEWS:
            options.perturbation, options.further_perturbations = name, None
            trainer.measurement = replace(measurement, views=(name,))
            score_perturbed(trainer, rollout)
            found[name] = rollout.signals.dependency
        options.perturbation, options.further_perturbations = VIEWS[0], list(VIEWS[1:])
        trainer.measurement = measurement
        monkeypatch.setattr(run, "score", score)
        for options.dependency_over in ("mean", "min"):
            score_perturbed(trainer, rollout)
            found[options.dependency_over] = rollout.signals.dependency
        found["images"] = rollout.perturbed_images

    monkeypatch.setattr("vgr_trl.trainer.score_perturbed", measured)
    run.train()
    each = torch.stack([found[name] for name in VIEWS])
    assert each.std(0).max() > 1e-7, "the views differ"
    torch.testing.assert_close(found["mean"], each.mean(0))
    torch.testing.assert_close(found["min"], each.amin(0))
    assert passes == [24, 24], "8 rows in 3 views, in one pass"
    assert found["images"][0][0].getcolors() == [(found["images"][0][0].width ** 2, (128, 128, 128))]


def rollout_of(run, monkeypatch):
    """The rollout of one step of a trainer, scored under perturbations."""
    found = []

    def measured(trainer, rollout):
        score_perturbed(trainer, rollout)
        found.append(copy(rollout))

    monkeypatch.setattr("vgr_trl.trainer.score_perturbed", measured)
    run.train()
    return found[0]


def asked_without_images(run, rollout):
    """(N, T) log-probabilities, each row alone: its text, tokenized without the image, and its completion."""
    rows = []
    for messages, completion in zip(rollout.messages, rollout.batch["completion_ids"], strict=True):
        text = [
            {"role": message["role"], "content": [part for part in message["content"] if part["type"] == "text"]}
            for message in messages
        ]
        prompt = run.processing_class.apply_chat_template(
            text, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        ids = torch.cat([prompt, completion[None]], dim=1)
        with torch.no_grad():
            logits = run.model(input_ids=ids).logits[0, prompt.size(1) - 1 : -1] / run.temperature
        rows.append(logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("share", ["on", "off"])
def test_the_question_without_its_image(share, vision_trainer, monkeypatch):
    """In one pass with a perturbed image, and equal to each row alone, with no token of the image."""
    run = vision_trainer(
        max_steps=1, credit_rules=["trajectory_scale"], signals=["stability"], share_prompts=share,
        perturbation="remove_image", further_perturbations=["gaussian_blur"], learning_rate=0.0,
    )  # fmt: skip
    passes, scored = [], run.score
    monkeypatch.setattr(
        run, "score", lambda inputs, *more, **named: passes.append(inputs) or scored(inputs, *more, **named)
    )
    rollout = rollout_of(run, monkeypatch)
    signals = rollout.signals
    expected = asked_without_images(run, rollout)
    valid = signals.mask.bool()
    assert torch.allclose(signals.views["remove_image"][valid], expected[valid], atol=1e-5)
    text, blurred = signals.views["remove_image"], signals.views["gaussian_blur"]
    each = [(seen - signals.logps).exp() - (seen - signals.logps) - 1 for seen in (text, blurred)]
    assert torch.allclose(signals.dependency[valid], (sum(each) / 2)[valid], atol=1e-5)
    assert torch.allclose(signals.extra["stability"][valid], (1 - (text.exp() - blurred.exp()).abs())[valid], atol=1e-6)
    perturbed = passes[-1]
    assert perturbed["num_images"] == [0] * 8 + [1] * 8
    image = run.processing_class.tokenizer.convert_tokens_to_ids(run.processing_class.image_token)
    assert (perturbed["input_ids"] == image).any(1).tolist() == [False] * 8 + [True] * 8


@declares(needs=("logps", "logps:mask_image"))
def unseen(advantages, signals, mask, options):
    """Keep the tokens that are likelier with the image than behind a grey one."""
    kept = signals.logps > signals.views["mask_image"]
    return kept, {"gain": signals.logps - signals.views["mask_image"]}


def test_a_rule_reads_what_the_tokens_are_worth_under_a_perturbation(vision_trainer, monkeypatch):
    """One perturbation is scored, that of the rule; the one of the options is not, as nothing reads it."""
    monkeypatch.setitem(registries.credit_rules._own, "unseen", unseen)
    run = vision_trainer(max_steps=1, credit_rules=["unseen"], black_prob=0.9, mask_value=0, replay_buffer_size=4)
    assert set(run.idle_options) == {"black_prob"}
    rollout = rollout_of(run, monkeypatch)
    assert list(rollout.signals.views) == ["mask_image"]
    assert rollout.signals.dependency is None
    kept = rollout.signals.logps > rollout.signals.views["mask_image"]
    share = (kept & rollout.signals.mask).sum() / rollout.signals.mask.sum()
    assert logged(run, "credit/unseen/token_fraction") == [pytest.approx(share.item())]
    assert 0 < share < 1
    assert logged(run, "credit/unseen/gain")


@declares(needs=("dependency",))
def hindsight(completions, dependency=None, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        (hindsight, {}, "The reward hindsight needs dependency, measured after the rewards"),
        (letters_reward, {"signals": ["stability"]}, "The signal stability compares perturbations"),
    ],
)
def test_what_is_not_there(reward, options, message, vision_trainer):
    with pytest.raises(ConfigError, match=message):
        vision_trainer(reward, **options)


def test_stability_by_hand_and_through_a_buffer():
    """Probabilities 0.2 and 0.6 have a standard deviation of 0.2; 0 and 1 one of 0.5; 1, 1 one of 0."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    nothing = torch.zeros(1, 3)
    views = {"mask_image": torch.tensor([[0.2, 0.0, 1.0]]).log(), "crop_image": torch.tensor([[0.6, 1.0, 1.0]]).log()}
    signals = signals_of_columns(columns_of_signals(RolloutSignals(nothing, nothing, mask, views=views)))
    options = PerturbationOptions(
        perturbation="mask_image", further_perturbations=["crop_image"], signals=["stability"]
    )
    assert add_named(named_signals(options), signals) == ["stability"]
    assert signals.extra["stability"][0].tolist() == pytest.approx([0.6, 0.0, 1.0])
