"""What TRL logs of one rollout batch and of further rounds of prompts, made one."""

from collections import defaultdict, deque

import pytest

from vgr_trl.patches import keep_newest, let_tables_hold, merge_rounds, replace_newest

NAN = float("nan")


def test_rounds_become_one_entry():
    """A batch of 8 completions and rounds of 4 and 2, after an entry of an earlier rollout: (8 a + 4 b + 2 c) / 14."""
    metrics = {
        "reward": [9.0, 1.0, 2.0, 3.0],
        "rewards/of_one/mean": [9.0, NAN, 2.0, 8.0],
        "rewards/of_none/mean": [9.0, NAN, NAN, NAN],
        "completions/min_length": [1.0, 5.0, 3.0, 4.0],
        "completions/max_length": [99.0, 5.0, 3.0, 7.0],
        "sampling/importance_sampling_ratio/max": [9.0, 0.5, 1.5, 1.0],
        "num_tokens": [70.0],
        "step_time": [1.0],
    }
    before = {name: 1 if name in ("num_tokens", "step_time") else 2 for name in metrics}
    merge_rounds(metrics, before, [8, 4, 2])
    assert metrics.pop("rewards/of_none/mean") == pytest.approx([9.0, NAN], nan_ok=True)
    assert metrics == {
        "reward": [9.0, pytest.approx(22 / 14)],
        "rewards/of_one/mean": [9.0, 4.0],
        "completions/min_length": [1.0, 3.0],
        "completions/max_length": [99.0, 7.0],
        "sampling/importance_sampling_ratio/max": [9.0, 1.5],
        "num_tokens": [70.0],
        "step_time": [1.0],
    }


def test_a_batch_without_further_rounds_stays():
    metrics = {"reward": [1.0, 2.0]}
    merge_rounds(metrics, {"reward": 2}, [8])
    assert metrics == {"reward": [1.0, 2.0]}


def test_tables_hold_further_rounds_of_the_same_batch_only():
    logs = {"prompt": deque("ab", maxlen=2), "rewards": defaultdict(lambda: deque(maxlen=2), {"r": deque([1, 2])})}
    let_tables_hold(logs, 6)
    logs["prompt"].extend("cdef")
    logs["rewards"]["late"].extend([1, 2, 3])
    keep_newest(logs, 2)
    assert [*logs["prompt"], *logs["rewards"]["r"], *logs["rewards"]["late"]] == ["e", "f", 1, 2, 2, 3]
    logs["prompt"].extend("ghij")
    assert "".join(logs["prompt"]) == "efghij"


def test_the_newest_values_of_a_column_are_replaced():
    column = deque([1, 2, 3, 4], maxlen=4)
    replace_newest(column, [7, 8])
    assert list(column) == [1, 2, 7, 8]
