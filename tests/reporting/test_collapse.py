"""Signs of collapse: what counts as one, what does not, and what a trainer does about it."""

import math
from itertools import repeat
from types import SimpleNamespace

import pytest

from vgr_trl.metrics.collapse import CollapseWatch, MetricHistory, find_collapse, first_signs

WEIGHTS = {"accuracy_reward": 2.5, "vgr_reward": 1.0, "think_format_reward": 0.5}
HEALTHY = {
    "rewards/accuracy_reward/mean": 0.6, "rewards/accuracy_reward/std": 0.4, "rewards/vgr_reward/mean": 0.5,
    "rewards/vgr_reward/std": 0.3, "rewards/think_format_reward/mean": 0.9, "rewards/think_format_reward/std": 0.2,
    "completions/mean_length": 100.0, "completions/clipped_ratio": 0.1, "entropy": 0.3, "frac_reward_zero_std": 0.4,
}  # fmt: skip


PERCEPTION = HEALTHY | {"perception_loss": -0.1, "perturbed_entropy": 0.8, "clip_ratio/high_mean": 0.01}
HACKED = {"perception_loss": -1.5, "healthy": PERCEPTION, "perturbed": 2.5, "clip_ratio_high": 0.2}


def signs(weights=WEIGHTS, steps=8, healthy=HEALTHY, **changed):
    """Signs after 16 healthy steps and `steps` changed ones; metrics are named by a part of their name."""
    histories = {name: MetricHistory() for name in healthy}
    for name, history in histories.items():
        plain = "^" + name.replace("/", "_")
        [now] = [value for part, value in changed.items() if part in plain] or [healthy[name]]
        for value in [*repeat(healthy[name], 16), *repeat(now, steps)]:
            history.add(value)
    return find_collapse(histories, weights)


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"accuracy_reward_mean": 0.2}, "accuracy_reward fell from 0.6 to 0.2"),
        ({"mean_length": 20.0}, "the length of completions fell from 100 to 20"),
        ({"clipped_ratio": 0.95}, "95% of the completions are truncated (lowest so far 10%)"),
        ({"entropy": 0.001}, "entropy fell from 0.3 to 0.001"),
        ({"entropy": 1.3}, "entropy rose from 0.3 to 1.3"),
        ({"zero_std": 0.97}, "97% of the groups have equal rewards (lowest so far 40%)"),
        (
            {"vgr_reward_mean": 0.1, "accuracy_reward_std": 0.04, "format_reward_std": 0.0},
            "vgr_reward fell from 0.5 to 0.1 and makes up 75% of the rewards' deviation",
        ),
        (HACKED | {"^entropy": 0.5}, "the perception loss fell from -0.1 to -1.5 while entropies rose"),
        (
            HACKED | {"^entropy": 0.5, "healthy": PERCEPTION | {"clip_ratio/high_mean": 0.0}, "clip_ratio_high": 0.0},
            "the perception loss fell from -0.1 to -1.5 while entropies rose",  # nothing to clip: no sign either way
        ),
    ],
    ids=str,
)
def test_each_sign(changed, seen):
    [sign] = signs(**changed)
    assert sign.seen == seen
    assert sign.remedies


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"accuracy_reward_mean": 0.35, "mean_length": 30.0, "entropy": 0.05, "zero_std": 0.9},
        {"accuracy_reward_mean": 0.0, "healthy": HEALTHY | {"rewards/accuracy_reward/mean": 0.08}},
        {"entropy": 1.1},  # less than four times the lowest
        {"vgr_reward_mean": 0.1},  # the other rewards rule the advantages
        {"format_reward_mean": 0.0, "steps": 3},  # a few bad steps
        {"format_reward_mean": 0.0, "weights": WEIGHTS | {"think_format_reward": 0.0}},
        HACKED,  # the entropy did not rise
        HACKED | {"^entropy": 0.5, "perception_loss": -0.15},
        HACKED | {"^entropy": 0.5, "clip_ratio_high": 0.01},
    ],
    ids=str,
)
def test_what_is_no_sign(changed):
    assert signs(**changed) == []


def test_a_loss_that_is_not_finite_is_a_sign_at_once():
    assert first_signs([(1, {"loss": 0.1}), (2, {"loss": math.nan})]) == [(2, "loss is not finite")]


@pytest.mark.parametrize(("micro_batches", "logged_every"), [(1, 1), (4, 1), (4, 3)])
def test_a_collapse_is_seen_whatever_the_accumulation(micro_batches, logged_every):
    """The last micro-batches have groups of equal rewards only, and so no entropy."""
    metrics = {"train": {"entropy": []}}
    watch, args, control = (
        CollapseWatch(metrics["train"], dict),
        SimpleNamespace(stop_on_collapse=True),
        SimpleNamespace(),
    )
    control.should_training_stop = False
    for step in range(1, 20):
        of_step = [0.5 if step <= 8 else 0.001] * max(1, micro_batches - 1) + [math.nan] * (micro_batches - 1)
        metrics["train"]["entropy"] += of_step[:micro_batches]
        watch.on_step_end(args, SimpleNamespace(global_step=step, is_world_process_zero=False), control)
        if control.should_training_stop:
            break
        if step % logged_every == 0:
            metrics["train"]["entropy"].clear()
            watch.start_window()
    assert step == 16
    assert "entropy fell from 0.5 to 0.001" in watch.found
