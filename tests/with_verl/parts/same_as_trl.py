"""What TRL's path and another trainer's made of the same rollout, compared."""

import json
from pathlib import Path

import torch
from support.launching import launch

# Everything that shapes advantages or adds to the loss, on images that are black altogether: `DAPOTrainer` blackens
# squares of the images, the others of what the processor made of them.
WANTED = {
    "token_weights": True, "token_weights_clip": [0.5, 2.0], "token_weights_last_k_layers": 1,
    "token_weights_positive_only": True, "enable_perception_filtering": True, "top_p_perception_tokens": 0.6,
    "enable_trajectory_reweighting": True, "use_entropy_penalty": True, "perception_loss_weight": 0.1,
    "der_loss_weight2": 0.03, "black_prob": 1.0, "vgr_reward_weight": 0.5,
}  # fmt: skip


def expected_of(folder, options):
    launch(Path(__file__).with_name("trl_step.py"), folder, json.dumps(options), processes=1)
    return torch.load(folder / "trl.pt")


def check(found, expected, mask):
    """Old log-probabilities, advantages, and gradients of both steps, to 1e-5 of the largest."""
    mask = mask.bool()
    for name in ("old_log_probs", "advantages"):
        assert close(found[name][mask], expected[name][mask]), name
    advantages = expected["advantages"][mask]
    assert len(advantages.unique()) > len(mask)  # tokens differ within a completion
    assert (advantages == 0).any()
    assert len(found["gradients"]) == len(expected["gradients"]) == 2
    for theirs, ours in zip(found["gradients"], expected["gradients"], strict=True):
        assert theirs.keys() == ours.keys()
        flat = [torch.cat([each[name].flatten() for name in sorted(ours)]) for each in (theirs, ours)]
        assert flat[1].abs().max() > 1e-3
        assert close(*flat)
    assert expected["clipped"][1] > 0  # in the second step, whose policy has moved


def close(found, expected):
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
