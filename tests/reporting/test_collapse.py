import math
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from vgr_trl.metrics.collapse import CollapseWatch, MetricHistory, find_collapse, first_signs

TABLE = yaml.safe_load(Path(__file__).with_name("collapse.yaml").read_text(encoding="utf-8"))


def signs(weights=(), steps=8, healthy=(), **changed):
    """Signs after 16 healthy steps and `steps` changed ones; metrics are named by a part of their name."""
    weights, healthy = TABLE["weights"] | dict(weights), TABLE["healthy"] | dict(healthy)
    histories = {name: MetricHistory() for name in healthy}
    for name, history in histories.items():
        plain = "^" + name.replace("/", "_")
        [now] = [value for part, value in changed.items() if part in plain] or [healthy[name]]
        for value in [*repeat(healthy[name], 16), *repeat(now, steps)]:
            history.add(value)
    return find_collapse(histories, weights)


@pytest.mark.parametrize(("changed", "seen"), TABLE["signs"], ids=str)
def test_each_sign(changed, seen):
    [sign] = signs(**changed)
    assert sign.seen == seen
    assert sign.remedies


@pytest.mark.parametrize("changed", TABLE["none"], ids=str)
def test_what_is_no_sign(changed):
    assert signs(**changed) == []


def test_a_loss_that_is_not_finite_is_a_sign_at_once():
    assert first_signs([(1, {"loss": 0.1}), (2, {"loss": math.nan})]) == [(2, "loss is not finite")]


@pytest.mark.parametrize(("micro_batches", "logged_every"), [(1, 1), (4, 1), (4, 3)])
def test_a_collapse_is_seen_whatever_the_accumulation(micro_batches, logged_every):
    """The last micro-batches have groups of equal rewards only, and so no entropy."""
    metrics = {"train": {"entropy": []}}
    watch, control = CollapseWatch(metrics["train"], dict), SimpleNamespace(should_training_stop=False)
    args = SimpleNamespace(stop_on_collapse=True)
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
    assert "entropy fell from 0.5 to 0.001" in watch.warning
