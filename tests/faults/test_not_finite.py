import math

import pytest
import torch
from support.trainers import weights
from transformers import TrainerCallback

from vgr_trl.errors import NotFiniteError, RewardError

EVERYTHING = {
    "token_weights": True, "enable_perception_filtering": True, "enable_trajectory_reweighting": True,
    "use_entropy_penalty": True, "replay_buffer_size": 4, "learning_rate": 1e-2, "weight_decay": 0.1,
    "lr_scheduler_type": "constant",
}  # fmt: skip


class Faulty(TrainerCallback):
    """Makes the hidden states of one row NaN in scoring or training, at some steps from 0; keeps the weights."""

    def __init__(self, trainer, phase, steps):
        self.trainer, self.phase, self.steps = trainer, phase, steps
        self.generates, self.hits = False, 0
        self.weights = [weights(trainer)]
        trainer.model.model.language_model.norm.register_forward_hook(self.spoil)
        generate = trainer.model.generate

        def generating(*args, **kwargs):
            self.generates = True
            found = generate(*args, **kwargs)
            self.generates = False
            return found

        trainer.model.generate = generating
        trainer.add_callback(self)

    def spoil(self, module, args, output):
        phase = "generation" if self.generates else "training" if torch.is_grad_enabled() else "scoring"
        if phase != self.phase or self.trainer.state.global_step not in self.steps:
            return output
        self.hits += 1
        spoilt = torch.zeros_like(output)
        spoilt[:1] = torch.nan
        return output + spoilt

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(weights(self.trainer))


@pytest.mark.parametrize("options", [{"compute_attention_metrics": False}, EVERYTHING], ids=["alone", "everything"])
def test_an_update_whose_gradient_is_nan_is_left_out(options, vision_trainer):
    trainer = vision_trainer(max_steps=3, **options)
    faulty = Faulty(trainer, "training", {1})
    trainer.train()
    assert faulty.hits
    left_out = [entry.get("skipped/updates", 0) for entry in trainer.state.log_history if "skipped/rows" in entry]
    assert left_out == [0, 1, 0]
    assert [torch.equal(*faulty.weights[step : step + 2]) for step in range(3)] == [False, True, False]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert all(value.isfinite().all() for value in [*moments, faulty.weights[-1]])


@pytest.mark.parametrize(
    ("phase", "steps", "options", "updates", "ended"),
    [
        ("scoring", {2}, EVERYTHING, 2, 2),
        ("scoring", {2}, {"num_iterations": 2, "reuse_first_pass": "off"}, 2, 2),
        ("training", range(1, 9), {"compute_attention_metrics": False}, 1, 5),
    ],
)
def test_nan_in_scoring_or_in_five_gradients_ends_the_run(phase, steps, options, updates, ended, vision_trainer):
    trainer = vision_trainer(max_steps=9, **options)
    faulty = Faulty(trainer, phase, steps)
    with pytest.raises(NotFiniteError):
        trainer.train()
    assert trainer.state.global_step == ended
    assert torch.equal(faulty.weights[updates], weights(trainer))


@pytest.mark.parametrize("rewards", [lambda: [math.inf] * 8, lambda: 1 / 0])
def test_a_reward_that_fails_ends_the_run(rewards, vision_trainer):
    trainer = vision_trainer([lambda completions, **kwargs: rewards()], max_steps=2, compute_attention_metrics=False)
    with pytest.raises(RewardError):
        trainer.train()
    assert trainer.state.global_step == 0
