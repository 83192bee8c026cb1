"""Updates on completions whose tools return images: TRL's, and the same whatever is left out of a pass."""

import pytest
import torch
from support.tool_runs import DAPO, STOCK
from support.trainers import BIG_STEPS, tiny_model, weights


def test_prompts_are_computed_once_where_completions_hold_images(make, model_folder):
    """In scoring, over perturbed images and in training, in one micro-batch and over several: the same update."""
    measures = {"token_weights": True, "enable_perception_filtering": True, "signals": ["similarity"]}
    measures |= {"skip_zero_advantage": "off", "skip_zero_advantage_tokens": "off"}
    for sizes in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        after, logged = [], []
        for sharing in ("off", "on"):
            torch.manual_seed(0)
            model = tiny_model(model_folder).double()
            options = BIG_STEPS | {"max_completion_length": 400} | sizes
            trainer = make(model=model, share_prompts=sharing, temperature=1.0, **options, **measures)
            trainer.train()
            after.append(weights(trainer))
            logged.append(trainer.state.log_history[0])
        assert (after[0] - after[1]).abs().max() < 1e-6
        # 16 turns are dealt, not generated; 8 rows are scored, scored again and trained on.
        assert logged[1]["sharing/prompts_per_row"] == pytest.approx((16 + 3 * 2) / (16 + 3 * 8))
        for name in ("attention/late/vgr", "signals/similarity", "perception_token_fraction"):
            assert logged[1][name] == pytest.approx(logged[0][name], rel=1e-5)


@pytest.mark.parametrize("changed", [{}, {"num_iterations": 2, "mask_truncated_completions": True}], ids=str)
def test_updates_are_those_of_trl(make, model_folder, changed):
    options = BIG_STEPS | {"max_completion_length": 400, "per_device_train_batch_size": 4,
                           "gradient_accumulation_steps": 2, **changed}  # fmt: skip
    after = []
    for kind in (STOCK, None):
        kinds = {"kind": kind, **DAPO} if kind else {"compute_attention_metrics": False}
        torch.manual_seed(0)
        trainer = make(model=tiny_model(model_folder).double(), **options, **kinds)
        trainer.train()
        after.append(weights(trainer))
    before = torch.cat([each.detach().flatten() for each in tiny_model(model_folder).double().parameters()])
    assert (after[0] - before).abs().max() > 1e-4
    assert (after[0] - after[1]).abs().max() < 1e-9


def test_a_completion_that_ends_behind_an_image(make):
    """An image is not cut off where nothing behind it has a loss: updates are those of passes over all columns."""
    rule = "support.tool_runs.first_tokens"
    after = []
    for skips in ("auto", "off"):
        torch.manual_seed(0)
        trainer = make(credit_rules=[rule], skip_padding=skips, compute_attention_metrics=False, **BIG_STEPS | {
            "max_completion_length": 400})  # fmt: skip
        trainer.train()
        after.append(weights(trainer))
    assert (after[0] - after[1]).abs().max() < 1e-5
