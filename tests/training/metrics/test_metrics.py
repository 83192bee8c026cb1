import math
from types import SimpleNamespace

import pytest
import torch

from vgr_trl.callbacks import StepMetrics, approximate_kl, over_live_tokens, weigh_by_tokens
from vgr_trl.rollout import TrainingPass


def test_approximate_kl_by_hand():
    """Ratios 2 and 1/2: 2 - 1 - ln 2 = 0.306853, 1/2 - 1 + ln 2 = 0.193147; the last token does not count."""
    old = torch.tensor([[-2.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    new = old + torch.tensor([[math.log(2), -math.log(2), 5.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert approximate_kl(new, old, mask).tolist() == pytest.approx([0.5, 0.0], abs=1e-6)


def test_rates_start_a_new_window_after_each_reading():
    """Two micro-batches on one process: 4 + 3 tokens of prompts and completions, 2 completions each."""
    weights = {"reward_func_names": ["accuracy", "format"], "reward_weights": torch.tensor([0.5, 2.0])}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(reduce=lambda local, reduction: local), **weights)
    steps = StepMetrics(trainer)
    inputs = {"prompt_mask": torch.tensor([[1, 1], [1, 1]]), "completion_mask": torch.tensor([[1, 1], [1, 0]])}
    for _ in range(2):
        assert steps.measure(TrainingPass(inputs, logps=torch.zeros(2, 2))) == {"approx_kl": 0.0}
    rest = {
        "skipped/rows": 0.0, "skipped/tokens": 0.0, "reward_weights/accuracy": 0.5, "reward_weights/format": 2.0,
    }  # fmt: skip
    assert steps.of_window(2.0) == {"perf/tokens_per_second": 7.0, "perf/samples_per_second": 2.0, **rest}
    steps.count_prompt_too_long()
    rest["data/prompts_too_long"] = 1
    assert steps.of_window(1.0) == {"perf/tokens_per_second": 0.0, "perf/samples_per_second": 0.0, **rest}


def test_every_token_counts_the_same_in_a_mean_over_micro_batches():
    """0.5 over 10 tokens and 0.2 over 30 make 0.275; the mean of the two would be 0.35."""
    metrics = {"kl": [0.5, 0.2], "entropy": [math.nan, 2.0], "loss": [1.0, 3.0], "entropy_penalty": [7.0]}
    weigh_by_tokens(metrics, ("kl", "entropy", "entropy_penalty", "perception_loss"), [10.0, 30.0])
    assert metrics == {"kl": [pytest.approx(0.275)], "entropy": [2.0], "loss": [1.0, 3.0], "entropy_penalty": [7.0]}


def test_means_over_live_tokens_by_hand():
    """0.3 over 10 tokens, of which 4 are live and 6 count as 0, is 0.75 over the 4; the value before stays."""
    metrics = {"entropy": [0.9, 0.3], "loss": [1.0]}
    over_live_tokens(metrics, ("entropy", "kl"), 10.0, 4.0)
    assert metrics == {"entropy": [0.9, pytest.approx(0.75)], "loss": [1.0]}
    over_live_tokens(metrics, ("entropy",), 10.0, 0.0)
    assert math.isnan(metrics["entropy"][-1])


def test_what_is_not_live_is_counted_as_skipped():
    """Of 3 valid tokens of 2 completions 1 is live, in the one that runs; ratio 2 there: 2 - 1 - ln 2 = 0.306853."""
    args = SimpleNamespace(importance_sampling_level="token", has_token_advantages=False)
    accelerator = SimpleNamespace(reduce=lambda local, reduction: local)
    trainer = SimpleNamespace(accelerator=accelerator, args=args, reward_func_names=[], reward_weights=torch.tensor([]))
    steps, old = StepMetrics(trainer), torch.tensor([[-2.0, -1.0], [-1.0, -1.0]])
    inputs = {"prompt_mask": torch.ones(2, 1), "completion_mask": torch.tensor([[1, 1], [1, 0]])}
    live = torch.tensor([[True, False], [False, False]])
    passed = TrainingPass(inputs | {"old_per_token_logps": old}, logps=old + math.log(2), loss_mask=live, rows_run=1)
    metrics = {"entropy": [0.5]}
    assert steps.measure(passed, metrics) == {"approx_kl": pytest.approx(0.306853, abs=1e-6)}
    steps.merge(metrics)
    assert metrics["entropy"] == [pytest.approx(1.5)]
    for rows, tokens in ((1.0, 2.0), (0.0, 0.0)):
        found = steps.of_window(1.0)
        assert (found["skipped/rows"], found["skipped/tokens"]) == (rows, tokens)


def test_micro_batches_without_tokens_leave_values_as_they_are():
    metrics = {"kl": [0.5, 0.2]}
    weigh_by_tokens(metrics, ("kl",), [0.0, 0.0])
    assert metrics == {"kl": [0.5, 0.2]}
