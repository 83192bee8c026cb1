"""A model that computes NaN: which updates are left out, what ends the run, and that no weight becomes NaN."""

import logging

import pytest
import torch
from transformers import TrainerCallback

from vgr_trl.utils import NotFiniteError

EVERYTHING = {
    "token_weights": True,
    "enable_perception_filtering": True,
    "enable_trajectory_reweighting": True,
    "use_entropy_penalty": True,
    "replay_buffer_size": 4,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "constant",
}


class Faulty(TrainerCallback):
    """Makes the hidden states of one row NaN in the passes of a phase, at the steps that are given; keeps the weights.

    Args:
        trainer: of the tiny model.
        phase: generation, scoring or training.
        steps: from 0.
    """

    def __init__(self, trainer, phase, steps):
        self.trainer, self.phase, self.steps = trainer, phase, steps
        self.generates, self.hits = False, 0
        self.weights = [self.copied()]
        trainer.model.model.language_model.norm.register_forward_hook(self.spoil)
        generate = trainer.model.generate

        def generating(*args, **kwargs):
            self.generates = True
            try:
                return generate(*args, **kwargs)
            finally:
                self.generates = False

        trainer.model.generate = generating
        trainer.add_callback(self)

    def copied(self):
        return {name: value.detach().clone() for name, value in self.trainer.model.named_parameters()}

    def spoil(self, module, args, output):
        phase = "generation" if self.generates else "training" if torch.is_grad_enabled() else "scoring"
        if phase != self.phase or self.trainer.state.global_step not in self.steps:
            return output
        self.hits += 1
        spoilt = torch.zeros_like(output)
        spoilt[:1] = torch.nan
        return output + spoilt

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(self.copied())


def are_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def said(caplog):
    return [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]


@pytest.fixture
def warnings(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("options", [{"compute_attention_metrics": False}, EVERYTHING], ids=["alone", "everything"])
def test_an_update_whose_gradient_is_nan_is_left_out(options, vision_trainer, warnings):
    trainer = vision_trainer(max_steps=3, **options)
    faulty = Faulty(trainer, "training", {1})
    trainer.train()
    assert faulty.hits
    left_out = [entry.get("skipped/updates", 0) for entry in trainer.state.log_history if "skipped/rows" in entry]
    assert left_out == [0, 1, 0]
    assert [are_equal(*faulty.weights[step : step + 2]) for step in range(3)] == [False, True, False]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert all(value.isfinite().all() for value in [*moments, *faulty.copied().values()])
    (sentence,) = said(warnings)
    assert "The gradient of step 2 is NaN or infinite: the update is left out, and weights and optimizer" in sentence


def test_groups_of_a_pass_that_was_nan_are_not_replayed(vision_trainer):
    """Without a pass before, their log-probabilities are those of the first training pass."""
    trainer = vision_trainer(max_steps=3, replay_buffer_size=8, compute_attention_metrics=False)
    Faulty(trainer, "training", {1})
    trainer.train()
    groups = trainer.replay.buffer.state_dict()["groups"]
    assert len(groups) == 5  # six were generated, one of them with a completion whose pass was NaN
    for group in groups:
        assert group["rows"]["columns"]["old_per_token_logps"].isfinite().all()


@pytest.mark.parametrize("options", [EVERYTHING, {"num_iterations": 2, "reuse_first_pass": "off"}])
def test_nan_in_scoring_ends_the_run(options, vision_trainer):
    trainer = vision_trainer(max_steps=4, **options)
    faulty = Faulty(trainer, "scoring", {2})
    with pytest.raises(NotFiniteError, match="log-probabilities of 1 of 8 completions are NaN, at step 3: its weights"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert are_equal(faulty.weights[2], faulty.copied())


def test_a_gradient_that_stays_nan_ends_the_run(vision_trainer):
    trainer = vision_trainer(max_steps=9, compute_attention_metrics=False)
    faulty = Faulty(trainer, "training", set(range(1, 9)))
    with pytest.raises(NotFiniteError, match="NaN or infinite in 5 steps in a row, up to step 6, and nothing was"):
        trainer.train()
    assert len(faulty.weights) == 6
    assert are_equal(faulty.weights[1], faulty.weights[-1])
    assert are_equal(faulty.weights[1], faulty.copied())
