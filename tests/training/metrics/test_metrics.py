import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers.integrations import integration_utils

from vgr_trl.batch import Batch
from vgr_trl.callbacks.trackers import guard_trackers, rename_for_verl
from vgr_trl.metrics import step_metrics as clocks
from vgr_trl.metrics.step_metrics import StageClock, StepMetrics

VERL = yaml.safe_load(Path(__file__).with_name("verl_names.yaml").read_text(encoding="utf-8"))
REWARD = {"critic/rewards/mean": 2.0, "reward/overall": 2.0}


def alone(**more):
    args = SimpleNamespace(
        importance_sampling_level="token", shapes_advantages=False, uses_critic=False, num_generations=2,
        **{"loss_type": "dapo"} | more,
    )  # fmt: skip
    return StepMetrics(args, SimpleNamespace(reduce=lambda local, reduction: local))


def rows_of(prompt_mask, completion_mask):
    return Batch(prompt_mask, prompt_mask, completion_mask, completion_mask)


def test_rates_and_kl_start_a_new_window_after_each_reading():
    """Two micro-batches on one process: 4 + 3 tokens of prompts and completions, 2 completions each.

    A ratio of 2 is 2 - 1 - ln 2 = 0.306853, over three tokens; padding does not count.
    """
    steps, weights = alone(), {"accuracy": 0.5, "format": 2.0}
    batch = rows_of(torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]]))
    batch.old_logps = torch.tensor([[-2.0, -1.0], [-1.0, -1.0]])
    for _ in range(2):
        logps = batch.old_logps + torch.tensor([[math.log(2), 0.0], [0.0, 5.0]])
        assert steps.measure(batch, logps, {}, batch.valid, 2) == {"approx_kl": pytest.approx(0.306853 / 3, abs=1e-6)}
    rest = {
        "skipped/rows": 0.0, "skipped/tokens": 0.0, "reward_weights/accuracy": 0.5, "reward_weights/format": 2.0,
    }  # fmt: skip
    rates = {"perf/tokens_per_second": 7.0, "perf/samples_per_second": 2.0}
    assert steps.summarise_window(2.0, weights) == rates | rest
    steps.prompts_too_long, steps.updates_skipped = 1, 2
    sometimes = {"data/prompts_too_long": 1, "skipped/updates": 2}
    assert steps.summarise_window(1.0, weights) == dict.fromkeys(rates, 0.0) | rest | sometimes


def test_means_over_tokens_that_were_scored():
    """Of three valid tokens in two rows one row of two ran; TRL's mean over the three becomes one over the two."""
    steps = alone()
    batch = rows_of(torch.ones(2, 1), torch.tensor([[1, 1], [1, 0]]))
    loss_mask = torch.tensor([[True, True], [False, False]])
    metrics = {"entropy": [9.0, 2.0]}
    assert steps.measure(batch, torch.zeros(2, 2), metrics, loss_mask, 1) == {"approx_kl": 0.0}
    assert metrics == {"entropy": [9.0, 3.0]}
    found = steps.summarise_window(1.0, {})
    assert (found["skipped/rows"], found["skipped/tokens"]) == (1.0, 1.0)


@pytest.mark.parametrize("by_token", [False, True])
def test_weights_of_vespo_are_averaged_over_completions_that_train(by_token):
    """A ratio of 2 with k = 2 and lambda = 3 weighs 4 e^-3; the completion without an advantage is skipped."""
    steps = alone(loss_type="vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
    advantages, ones = torch.tensor([1.0, 0.0]), torch.ones(2, 2)
    batch = rows_of(ones, ones)
    batch.old_logps, batch.advantages = torch.zeros(2, 2), advantages.unsqueeze(1) * ones if by_token else advantages
    logps, loss_mask = torch.tensor([[math.log(2), 0.0], [0.0, 0.0]]), torch.tensor([[True, True], [False, False]])
    metrics = {"vespo/phi_seq_mean": [9.0]}
    steps.measure(batch, logps, metrics, loss_mask, 1)
    assert metrics == {"vespo/phi_seq_mean": [pytest.approx(4 * math.exp(-3))]}


@pytest.fixture(params=["cpu", "cuda"])
def now(request, monkeypatch):
    """A clock's hands; on a GPU a device that is where the host is only after it was waited for."""
    hands = SimpleNamespace(at=100.0, waited=0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = hands.at

        def elapsed_time(self, end):
            assert hands.waited == 1
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: hands.at)
    monkeypatch.setattr(clocks.torch.cuda, "is_available", lambda: request.param == "cuda")
    monkeypatch.setattr(clocks.torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(clocks.torch.cuda, "Event", Event)
    monkeypatch.setattr(clocks.torch.cuda, "synchronize", lambda: setattr(hands, "waited", hands.waited + 1))
    return hands


def test_a_stage_within_another_stops_that_one(now):
    """Rewards take 2 + 1 s around a pass of 5 s; perturbing takes 4 s with the pass in it; the rest of 20 s is 8."""
    clock = StageClock()
    with clock.stage("update"):
        now.at += 7
        with clock.stage("reward"):
            now.at += 2
            with clock.stage("old_logps"):
                now.at += 5
            now.at += 1
        now.at += 1
    now.at += 50
    with clock.stage("perturbed"):
        now.at += 1
        with clock.stage("old_logps"):
            now.at += 3
    clock.on_pre_optimizer_step(None, None, None)
    now.at += 0.5
    clock.on_optimizer_step(None, None, None)
    accelerator = SimpleNamespace(device="cpu", gather=lambda own: own)
    found = clock.metrics(accelerator, 2)
    assert found == {"timing/reward": 1.5, "timing/old_logps": 2.5, "timing/perturbed": 2.0, "timing/update": 4.0,
                     "timing/optimizer": 0.25}  # fmt: skip
    assert clock.metrics(accelerator, 1) == {}


@pytest.mark.parametrize(("logs", "processes", "renamed"), VERL)
def test_names_of_verl(logs, processes, renamed):
    assert rename_for_verl(logs, processes) == pytest.approx(renamed)


class Tracker(integration_utils.TensorBoardCallback):
    __module__ = integration_utils.__name__

    def __init__(self):
        self.written = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.written.append(integration_utils.rewrite_logs(logs))


@pytest.mark.parametrize(
    ("names", "written"),
    [
        ("trl", {"train/reward": 2.0, "train/kl": 1.0, "train/perception_token_fraction": 0.2}),
        ("verl", REWARD | {"actor/kl_loss": 1.0, "actor/perception_token_fraction": 0.2}),
        ("mtrl", REWARD | {"agent/divergence_loss": 1.0, "agent/perception_token_fraction": 0.2}),
    ],
)
def test_trackers_get_the_names_that_are_asked_for(names, written):
    tracker = Tracker()
    guard_trackers([tracker], names, 1)
    logs = {"reward": 2.0, "kl": 1.0, "perception_token_fraction": 0.2}
    logs["ppo_kl"] = None  # a step without a gradient has none
    tracker.on_log(None, None, None, logs=logs)
    assert tracker.written == [written]
    assert logs["ppo_kl"] is None
    assert integration_utils.rewrite_logs({"a": 1}) == {"train/a": 1}
