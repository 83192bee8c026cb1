"""Seconds by stage, with a clock that a test turns; trackers that get the names of verl."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import integration_utils

from vgr_trl import metrics as clocks
from vgr_trl.callbacks import in_verl, name_for_trackers
from vgr_trl.metrics import OptimizerClock, StageClock


@pytest.fixture
def now(monkeypatch):
    hands = SimpleNamespace(at=100.0)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: hands.at)
    monkeypatch.setattr(clocks.torch.cuda, "is_available", lambda: False)
    return hands


def alone(other=None):
    """One process, or two of which the other one has these seconds."""
    rows = lambda own: own if other is None else torch.cat([own, torch.tensor(other)])  # noqa: E731
    return SimpleNamespace(device="cpu", gather=rows)


def test_a_stage_within_another_stops_that_one(now):
    """Rewards take 2 + 1 s around a pass of 5 s; perturbing takes 4 s with the pass in it; the rest of 20 s is 8."""
    clock = StageClock()
    with clock.stage("reward"):
        now.at += 2
        with clock.stage("old_logps"):
            now.at += 5
        now.at += 1
    now.at += 50
    with clock.stage("perceive"):
        now.at += 1
        with clock.stage("old_logps"):
            now.at += 3
    optimizer = OptimizerClock(clock)
    optimizer.on_pre_optimizer_step(None, None, None)
    now.at += 0.5
    optimizer.on_optimizer_step(None, None, None)
    found = clock.metrics(alone(), [12.0, 8.0])
    assert found == {"timing/reward": 1.5, "timing/old_logps": 2.5, "timing/perceive": 2.0, "timing/update": 4.0,
                     "timing/optimizer": 0.25}  # fmt: skip
    assert clock.metrics(alone(), [3.0]) == {"timing/update": 3.0}


def test_of_two_processes_the_slower_one_counts(now):
    clock = StageClock()
    with clock.stage("generation"):
        now.at += 2
    other = [3.0, 0, 0, 0, 0, 0, 0, 6.0, 0]
    assert clock.metrics(alone(other), [10.0]) == {"timing/generation": 3.0, "timing/update": 8.0}


LOGS = {
    "loss": 0.5, "policy_loss": 0.4, "reward": 1.5, "rewards/accuracy/mean": 0.7, "approx_kl": 0.1, "step_time": 2.0,
    "clip_ratio/region_mean": 0.2, "perf/tokens_per_second": 300.0, "timing/generation": 1.0, "timing/update": 0.7,
    "timing/optimizer": 0.1, "perception_token_fraction": 0.25, "kl/mean": 0.01, "learning_rate": 1e-6,
}  # fmt: skip


def test_names_of_verl():
    assert in_verl({"loss": 0.5}) == {"loss": 0.5, "actor/pg_loss": 0.5}
    found = in_verl(LOGS, processes=3)
    expected = {
        "loss": 0.5, "actor/pg_loss": 0.4, "reward/overall": 1.5, "critic/rewards/mean": 1.5, "reward/accuracy": 0.7,
        "actor/approx_kl": 0.1, "timing_s/step": 2.0, "perf/time_per_step": 2.0, "actor/clipfrac": 0.2,
        "actor/pg_clipfrac": 0.2, "perf/tokens_per_second": 300.0, "perf/throughput": 100.0, "timing_s/gen": 1.0,
        "timing_s/update_actor": pytest.approx(0.8), "actor/perception_token_fraction": 0.25, "actor/kl_loss": 0.01,
        "actor/lr": 1e-6,
    }  # fmt: skip
    assert found == expected
    logs = {"eval_reward": 1.0, "eval_rewards/accuracy/mean": 0.5, "eval_reward/length": 7, "eval_loss": 2.0,
            "eval_completions/mean_length": 9.0}  # fmt: skip
    assert in_verl(logs) == {"val/reward_score": 1.0, "val/accuracy_reward": 0.5, "val/length_reward": 7,
                             "eval_loss": 2.0, "val_response_length/mean": 9.0}  # fmt: skip
    assert in_verl({"reward": 3.0, "reward/overall": 2.0}) == {"critic/rewards/mean": 3.0, "reward/overall": 2.0}


class Tracker(integration_utils.TensorBoardCallback):
    """Keeps what it would write, as the trackers of transformers name it."""

    __module__ = integration_utils.__name__

    def __init__(self):
        self.written = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.written.append(integration_utils.rewrite_logs(logs))


@pytest.mark.parametrize(
    ("names", "written"),
    [("trl", {"train/reward": 2.0}), ("verl", {"critic/rewards/mean": 2.0, "reward/overall": 2.0})],
)
def test_trackers_get_the_names_that_are_asked_for(names, written):
    tracker = Tracker()
    trainer = SimpleNamespace(
        args=SimpleNamespace(metric_names=names),
        accelerator=SimpleNamespace(num_processes=1),
        callback_handler=SimpleNamespace(callbacks=[tracker]),
    )
    name_for_trackers(trainer)
    logs = {"reward": 2.0, "ppo_kl": None}  # which a step without a gradient has no value of
    tracker.on_log(None, None, None, logs=logs)
    assert tracker.written == [written]
    assert logs == {"reward": 2.0, "ppo_kl": None}
    assert integration_utils.rewrite_logs({"a": 1}) == {"train/a": 1}
