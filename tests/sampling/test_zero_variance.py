from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vgr_trl.advantages import estimate_advantages, group_spread
from vgr_trl.batch import Placement
from vgr_trl.sampling.zero_variance import FurtherPrompts, ZeroVarianceStreak, filter_index, filtered_groups, prompt_key

NAN = float("nan")
NAMES = ["accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # NaN: fewer than two rewards. Rewards 0 1 0 have the deviation 1 / sqrt(3).
        ("grpo", [3**-0.5, 0, 3**0.5, 0, 3**-0.5, NAN, NAN]), ("rloo", [1, 0, 3, 0, 1, 0, 0]),
        ("remax", [0.5, 1, 2.5, 1, 1, 0, 0]),  # equal rewards below the greedy completion's still say something
        ("grpo_passk", [3**0.5, 0, 0, 0, 3**0.5, 0, 0]),  # two that are equally best say nothing
    ],
)  # fmt: skip
def test_which_groups_have_no_gradient_depends_on_the_estimator(estimator, expected):
    rewards = torch.tensor([0.0, 1, 0, 2, 2, 2, 3, 0, 3, 0, 0, 0, 0.0, 0, 1, NAN, NAN, NAN, NAN, 7, NAN])
    baseline = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.0, NAN, NAN]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 3, estimator, baseline)
    found = group_spread(advantages.view(-1, 3), rewards.view(-1, 3), estimator)
    assert found.tolist() == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_groups_whose_mean_lies_outside_or_on_a_bound_are_filtered():
    means = torch.tensor([0.0, 0.25, 0.5, 1.0, NAN], dtype=torch.float64)
    assert filtered_groups(means, 0.25, 1.0) == [0, 1, 3, 4]
    assert filtered_groups(means, 0.25, 1.0, inclusive=True) == [0, 4]
    assert filtered_groups(means, -1, 2) == [4]


def test_what_is_filtered_by():
    keys = ("overall", "accuracy_reward", "accuracy", "format", "overlong")
    assert [filter_index(key, NAMES) for key in keys] == [None, 0, 0, 1, 2]
    assert filter_index("accuracy", ["blind_accuracy_reward", "accuracy_reward"]) == 1, "its exact name goes first"


def streak(steps_per_rollout=1):
    options = {"replay_buffer_size": 0, "online_filtering": True, "steps_per_rollout": steps_per_rollout}
    return ZeroVarianceStreak(SimpleNamespace(**options))


def warned(counter, kept):
    """Rollouts at which there is a warning, when so many groups have a gradient at each."""
    return [number for number, count in enumerate(kept) if counter.end_rollout(count)]


@pytest.mark.parametrize(
    ("served", "expected"),
    [(1, [9, 17]), (0.5, [9, 17]), (2, [2, 7, 15]), (5, [0, 5, 13])],
)
def test_a_streak_of_five_steps_is_warned_of_once(served, expected):
    assert warned(streak(served), [0] * 4 + [1] + [0] * 7 + [2] + [0] * 5) == expected


def test_a_streak_goes_on_after_a_resume(tmp_path):
    before, after = streak(), streak()
    assert warned(before, [1, 0, 0]) == []
    before.save(tmp_path)
    after.load(tmp_path)
    assert warned(after, [0] * 5) == [2]


class Stream:
    """Rows that can only be read from the start."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(rows(self.length))


def rows(count):
    return [{"prompt": str(number)} for number in range(count)]


def drawn(prompts, count):
    prompts._used.clear()
    return [int(row["prompt"]) for row in prompts.draw(count, Placement(4, 1))[0]]


@pytest.mark.parametrize(
    ("missing", "generations", "processes", "expected"), [(3, 8, 1, 3), (3, 8, 4, 3), (1, 4, 8, 2), (4, 8, 3, 6)]
)
def test_prompts_of_a_round_are_shared_equally(missing, generations, processes, expected):
    parts = []
    for process in range(processes):
        part, count = FurtherPrompts(rows(10)).draw(missing, Placement(4, generations, process, processes))
        assert count == expected
        parts.append([row["prompt"] for row in part])
    assert {len(part) * processes for part in parts} == {expected * generations}
    together = [prompt for part in parts for prompt in part]
    assert all(together[first : first + generations] == [together[first]] * generations
               for first in range(0, len(together), generations))  # fmt: skip
    assert FurtherPrompts(rows(10)).draw(11, Placement(4, generations, 0, processes))[1] <= 10


def test_each_pass_over_the_data_is_another_permutation():
    prompts = FurtherPrompts(rows(10), seed=4)
    passes = [drawn(prompts, 10) for _ in range(3)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0] != drawn(FurtherPrompts(rows(10), seed=5), 10)


@pytest.mark.parametrize("dataset", [rows(5), Stream(5)], ids=["with a length", "stream"])
def test_no_more_than_there_are(dataset):
    prompts = FurtherPrompts(dataset)
    prompts.begin(rows(4), Placement(4, 1))
    assert [row["prompt"] for row in prompts.draw(3, Placement(4, 1))[0]] == ["4"]
    assert prompts.draw(1, Placement(4, 1)) == ([], 0)


@pytest.mark.parametrize("dataset", [rows(7), Stream(7)], ids=["with a length", "stream"])
@pytest.mark.parametrize("before", [1, 7, 20])
def test_they_continue_after_an_interruption(dataset, before, tmp_path):
    whole = FurtherPrompts(dataset, seed=1)
    drawn(whole, before)
    whole.save(tmp_path)
    again = FurtherPrompts(dataset, seed=1)
    again.load(tmp_path)
    assert [drawn(again, 2), drawn(again, 5)] == [drawn(whole, 2), drawn(whole, 5)]


def test_prompts_are_the_same_if_text_and_images_are():
    image, other = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4), "white")
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]}]
    copy = [{"role": "user", "content": [{"type": "image", "image": image.copy()}, {"type": "text", "text": "Which?"}]}]
    assert prompt_key({"prompt": messages}) == prompt_key({"prompt": copy})
    assert prompt_key({"prompt": "Which?", "image": image}) != prompt_key({"prompt": "Which?", "image": other})
    degraded = {"prompt": "Which?", "image": other, "original_images": [image]}
    assert prompt_key(degraded) == prompt_key({"prompt": "Which?", "image": image}), "`degraded_by` draws none twice"
