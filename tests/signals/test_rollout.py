"""What is kept while a rollout batch is made: where attention is measured, and how it fits the batch."""

import pytest
import torch
from eager_reference import SPECIAL_IDS, VISION_IDS, difference, reference
from families import CLOSE, EOS, IMAGE, OPEN, VIDEO, build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionMass, RolloutMeasurement, Wanted, rollout
from vgr_trl.signals.rollout import pad_to_length


def measurement_of(source, **wanted):
    return RolloutMeasurement(Wanted(**wanted), VISION_IDS, SPECIAL_IDS, source)


def scoring(model, inputs, length):
    """Passes the batch through the model, as TRL's scoring does; what it returns does not matter here."""

    def score():
        with torch.no_grad():
            model(**inputs)
        scores = torch.zeros(len(inputs["input_ids"]), length)
        return scores, scores, None

    return score


def test_attention_measured_by_scoring():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    expected = reference(model, batch)
    measurement = measurement_of("scoring", attention=("vgr",))
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    with measurement.rollout():
        with measurement.generation(model):
            assert "generate" not in vars(model)
        measurement.measure(model, ids, mask, 12, scoring(model, batch.inputs, 12))
        mass = measurement.signals.attention
        assert difference(mass.vision, expected.vision, expected.valid) < 1e-5
        assert torch.equal(mass.mask, expected.valid)
        assert measurement.prompt_mass.vision.shape == (2, 6, 1)
    assert measurement.prompt_mass is measurement.signals is None


def test_scores_are_kept_in_float32_and_without_a_graph():
    """TRL's may be bfloat16 under autocast."""
    measurement = measurement_of("scoring", entropies=("x",))
    scores = torch.full((2, 3), 0.5, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(2, 5, dtype=torch.long)
    with measurement.rollout():
        measurement.measure(build("llava"), ids, torch.ones_like(ids), 3, lambda: (scores, scores * 2, None))
        for found, value in ((measurement.signals.logps, 0.5), (measurement.signals.entropies, 1.0)):
            assert (found.dtype, found.requires_grad) == (torch.float32, False)
            assert found.eq(value).all()
        assert measurement.signals.mask.shape == (2, 3)


@pytest.mark.parametrize("longer", [0, 3, -2])
def test_attention_measured_in_generation(longer):
    """The same as by scoring; columns that padding adds do not count, columns that are cut off are gone."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    prompts = batch.prompt_inputs()
    measurement = measurement_of("generate", attention=("token_weights",))
    torch.manual_seed(0)
    with measurement.rollout(), share_prompts(model), measurement.generation(model):
        tokens = model.generate(
            **prompts, do_sample=True, max_new_tokens=8, suppress_tokens=[IMAGE, VIDEO, OPEN, CLOSE, EOS]
        )
        generated = None
    with measurement.rollout():
        with share_prompts(model), measurement.generation(model):
            torch.manual_seed(0)
            again = model.generate(
                **prompts, do_sample=True, max_new_tokens=8, suppress_tokens=[IMAGE, VIDEO, OPEN, CLOSE, EOS]
            )
        assert torch.equal(tokens, again)
        generated = measurement.generated_mass
        length = 8 + longer
        prompt = prompts["input_ids"].size(1)
        ids = torch.nn.functional.pad(tokens, (0, max(longer, 0)))[:, : prompt + length]
        mask = torch.nn.functional.pad(prompts["attention_mask"], (0, min(length, 8)), value=1)
        mask = torch.nn.functional.pad(mask, (0, max(longer, 0)))
        passes = []
        hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
        inputs = {**prompts, "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
        measurement.measure(model, ids, mask, length, scoring(model, inputs, length))
        hook.remove()
        found = measurement.signals.attention
        by_scoring = measurement_of("scoring", attention=("vgr",))
        with by_scoring.rollout():
            by_scoring.measure(model, ids, mask, length, scoring(model, inputs, length))
            expected = by_scoring.signals.attention
    assert passes == [1], "one pass for log-probabilities"
    assert found.vision.shape == expected.vision.shape == (2, 6, length)
    assert torch.equal(found.mask, expected.mask)
    assert difference(found.vision, expected.vision, found.mask) < 1e-5
    assert difference(found.instruction, expected.instruction, found.mask) < 1e-5
    assert measurement.generated_mass is None
    assert generated.vision.size(2) == 8


def test_nothing_is_measured_in_generation_that_nobody_wants():
    model = build("llava")
    for measurement in (measurement_of("generate", entropies=("x",)), measurement_of("scoring", attention=("x",))):
        with measurement.rollout(), measurement.generation(model):
            assert "generate" not in vars(model)
    with measurement_of("generate", attention=("x",)).generation(model):
        assert "generate" not in vars(model), "outside of a rollout, as in a user's own generation"


def test_a_batch_made_while_another_is_made():
    """As further prompts are sampled: what is kept of the first comes back."""
    measurement = measurement_of("scoring", attention=("x",))
    with measurement.rollout():
        measurement.keep_prompts("first")
        with measurement.rollout():
            assert measurement.prompts is None
            measurement.keep_prompts("second")
            measurement.keep_prompts("third")
            assert measurement.prompts == "second"
        assert (measurement.active, measurement.prompts) == (True, "first")
    assert (measurement.active, measurement.prompts) == (False, None)


@pytest.mark.parametrize(("length", "kept"), [(2, [True, True]), (4, [True, True, True, False])])
def test_fitting(length, kept):
    mass = AttentionMass(
        torch.ones(1, 1, 3), torch.ones(1, 1, 3), torch.tensor([1]), torch.tensor([1]), torch.ones(1, 3) > 0
    )
    assert pad_to_length(mass, length).mask.tolist() == [kept]
    assert pad_to_length(mass, length).vision.tolist() == [[[float(one) for one in kept]]]


def test_maps_are_kept_of_as_many_rows_as_fit(monkeypatch):
    """2 layers, 12 tokens, vision tokens as the rows have them, 4 bytes each; a smaller row behind a large one fits."""
    model = build("llava")
    vision = torch.zeros(4, 40, dtype=torch.bool)
    for row, tokens in enumerate((16, 32, 16, 8)):
        vision[row, :tokens] = True
    measurement = measurement_of("scoring", attention=("x",))
    measurement.keep_rows = (0, 1, 2, 3)
    one = 4 * 2 * 12 * 16
    for most, kept in ((one - 1, [3]), (one, [0]), (2 * one - 1, [0, 3]), (2 * one, [0, 2]), (3 * one, [0, 1])):
        monkeypatch.setattr(rollout, "MOST_KEPT", most)
        assert measurement._rows_that_fit(model, vision, 12) == kept
    measurement.keep_rows = None
    assert measurement._rows_that_fit(model, vision, 12) == []
