import pytest
import torch
from support.trainers import begin, scored_passes

from vgr_trl.errors import DataError
from vgr_trl.loss.terms import average_as_loss
from vgr_trl.trl_bridge import from_trl


def micro_batches(trainer):
    rows = begin(trainer)
    first = trainer._prepare_inputs(rows)
    trainer._step += 1
    return [first, trainer._prepare_inputs(rows)]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "luspo", "vespo"])
def test_terms_are_averaged_as_trl_averages_its_loss(make, loss_type):
    """At ratio 1 TRL's loss is minus the average of the advantages; for cispo and vespo, of advantage times log p."""
    trainer = make(loss_type=loss_type)
    for inputs in micro_batches(trainer):
        inputs["completion_mask"][0, 3:] = 0  # completions of different lengths
        mask = from_trl(inputs).valid
        inputs["advantages"] = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
        with scored_passes(trainer) as scored:
            loss = trainer._compute_loss(trainer.model, inputs)
        logps = scored[0].detach()
        values = inputs["advantages"] * (logps if loss_type in ("cispo", "vespo") else 1)
        values = values * (trainer.epsilon_high if loss_type == "cispo" else 1)  # which clips the ratio itself
        items, steps = inputs.get("num_items_in_batch"), trainer.current_gradient_accumulation_steps
        expected = -average_as_loss(values, mask, items, trainer.args, steps, num_processes=1)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)


def test_perturbed_images_are_of_their_own_prompt_and_repeat(make):
    """One for the completions of a prompt, or one for each; about half of the patches are black."""
    pixels = {}
    cases = {"prompt": {}, "again": {}, "each": {"perturb_per": "completion"}, "seed": {"seed": 1}}
    for name, options in cases.items():
        batches = micro_batches(make(perception_loss_weight=0.01, **options))
        pixels[name] = {row.numpy().tobytes() for inputs in batches for row in inputs["perturbed_pixel_values"]}
        if name == "prompt":
            same = [(torch.cat(batch["perturbed_pixel_values"]) == batch["pixel_values"]).float() for batch in batches]
            assert all(0.2 < part.mean() < 0.8 for part in same)
    assert (len(pixels["prompt"]), len(pixels["each"])) == (2, 8)
    assert pixels["again"] == pixels["prompt"]
    assert pixels["seed"].isdisjoint(pixels["prompt"])


def test_means_over_tokens_do_not_depend_on_the_number_of_micro_batches(make):
    """Two passes over one rollout, after the first of which the ratios are no longer 1."""
    terms = {"beta": 0.1, "perception_loss_weight": 0.05, "use_entropy_penalty": True}
    names = ["approx_kl", "kl", "entropy", "entropy_penalty", "perception_loss", "perturbed_entropy"]
    names += ["clip_ratio/region_mean"]
    found = []
    for rows, accumulated in ((8, 1), (2, 4)):
        trainer = make(
            per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated, num_iterations=2, max_steps=2,
            optim="sgd", learning_rate=0.3, max_grad_norm=1e9, logging_steps=2, epsilon=1e-4, **terms,
        )  # fmt: skip
        judge = trainer._generate_and_score_completions

        def uneven(rows, judge=judge):
            batch = judge(rows)
            lengths = 1 + torch.arange(8).unsqueeze(1) * 5 // 7  # 1 to 6 tokens
            batch["completion_mask"] *= torch.arange(batch["completion_mask"].size(1)) < lengths
            return batch

        trainer._generate_and_score_completions = uneven
        trainer.train()
        found.append(next(entry for entry in trainer.state.log_history if "approx_kl" in entry))
    one, several = found
    for name in names:
        assert abs(one[name]) > 1e-6, name
        assert several[name] == pytest.approx(one[name], rel=1e-3), name


def test_gradients_of_the_entropy_penalty_and_of_the_perception_loss_through_both_images(make):
    entropies = {"der_loss_weight1": 0.2, "der_loss_weight2": 0.1, "entropy_penalty_coef": 0.3}
    trainer = make(perception_loss_weight=0.5, use_entropy_penalty=True, **entropies)
    (inputs, _) = micro_batches(trainer)
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    with scored_passes(trainer) as scored:
        trainer._compute_loss(trainer.model, inputs).backward()
    mask = from_trl(inputs).valid
    logps, perturbed = scored
    tokens = inputs["num_items_in_batch"].item()
    slope = 0.5 * ((perturbed - logps).detach().exp() - 1)[mask]
    # d/dlogp of -(w (e^d - d - 1)) / M with d = perturbed - original, by hand; of -0.3 logp, -0.2 logp, -0.1 perturbed
    assert torch.allclose(logps.grad[mask], (slope - 0.3 - 0.2) / tokens, atol=1e-8)
    assert torch.allclose(perturbed.grad[mask], -(slope + 0.1) / tokens, atol=1e-8)


def test_a_term_of_ones_own_gets_hidden_states_and_both_images_and_its_gradient_is_by_hand(make, tmp_path):
    """0.5 (log p − log p')², and the mean of the squared states: d/dlogp = log p − log p', divided by the tokens."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from vgr_trl.registries import declares\n"
        "@dataclass\nclass Options:\n    weight: float = field(default=1.0, metadata={'help': 'A weight.'})\n"
        "@declares(needs=('perturbed', 'hidden'), options=Options)\n"
        "def squares(passed, options):\n"
        "    assert passed.hidden.shape[:2] == passed.loss_mask.shape and passed.hidden.requires_grad\n"
        "    passed.log('apart', passed.logps)\n"
        "    return options.weight * (passed.logps - passed.perturbed_logps).square()\n"
        "def wrong(passed, options):\n    return passed.logps.sum()\n"
        "def detached(passed, options):\n    return -passed.logps.detach()\n"
        "def nothing(passed, options):\n    return passed.loss_mask.new_zeros(passed.loss_mask.shape).float()\n"
    )
    options = {"loss_terms": [f"{tmp_path}/mine.py:squares"], "plugin_options": {"weight": 0.5}}
    trainer = make(**options)
    (inputs, _) = micro_batches(trainer)
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    with scored_passes(trainer) as scored:
        trainer._compute_loss(trainer.model, inputs).backward()
    logps, perturbed = scored
    mask, difference = from_trl(inputs).valid, (logps - perturbed).detach()
    expected = difference[mask] / inputs["num_items_in_batch"].item()
    assert torch.allclose(logps.grad[mask], expected, atol=1e-8)
    assert torch.allclose(perturbed.grad[mask], -expected, atol=1e-8)
    assert trainer._metrics["train"]["apart"][-1] == pytest.approx(logps[mask].mean().item(), rel=1e-5)
    for name in ("wrong", "detached"):
        trainer = make(loss_terms=[f"{tmp_path}/mine.py:{name}"])
        with pytest.raises(DataError):
            trainer.train()
    make(loss_terms=[f"{tmp_path}/mine.py:nothing"], max_steps=1).train()
