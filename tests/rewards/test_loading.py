"""How rewards come to a trainer, by hand from `Reward weights` in definitions.md, and what they may return."""

import asyncio
import copy
import functools
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch

from vgr_trl.errors import ConfigError, RewardError
from vgr_trl.registries import declares
from vgr_trl.rewards import (
    RewardSchedule,
    accuracy_reward,
    gather_groups,
    get_soft_overlong_punishment,
    load_reward,
    load_rewards,
    think_format_reward,
    vgr_reward,
)
from vgr_trl.rewards.calling import HANGING_ADVICE, check_callable, logger, wrap_reward


def test_rewards_by_name():
    """Lmax = 100 and c = 20, a fifth unless given: 90 tokens give −0.5; with c = 40 they give −0.75."""
    for name in ("accuracy", "accuracy_reward", "vgr_trl.rewards:accuracy_reward"):
        assert load_reward(name) is accuracy_reward
    assert load_reward(" vgr_trl.rewards.think_format_reward ") is think_format_reward
    assert load_reward("length", max_completion_length=100)([[1] * 90, [1] * 80]) == [-0.5, 0.0]
    assert load_reward("soft_overlong", max_completion_length=100, soft_punish_cache=40)([[1] * 90]) == [-0.75]
    with pytest.raises(RewardError):
        load_rewards(["accuracy", "format", "accuracy_reward"])
    for name in ("acuracy", 3, "length"):
        with pytest.raises(RewardError):
            load_reward(name)


def test_rewards_are_imported_without_torch_and_trl():
    code = (
        "import sys, vgr_trl.rewards as r\n"
        "assert r.load_rewards(['accuracy', 'format', 'length'], max_completion_length=8)\n"
        "assert r.accuracy_reward(['<answer>2x+1</answer>'], ['1+2x']) == [1.0]\n"
        "print([name for name in ('torch', 'trl', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert result.stderr == ""


REWARDS = [accuracy_reward, "models/judge-7b/", think_format_reward, get_soft_overlong_punishment(10, 2)]


def test_weights_by_step():
    """Early ones hold while the step is below the early steps: the warm-up, else a tenth of all steps."""
    schedule = RewardSchedule.for_rewards(REWARDS[:2], [1, 0.5], [0, 1])
    assert schedule.changes
    assert [schedule.weights_at(step, 3) for step in (0, 2, 3, 100)] == [[0, 1], [0, 1], [1, 0.5], [1, 0.5]]
    assert [schedule.early_steps(*given) for given in ((7, 100), (0, 100), (0, 101), (0, -1))] == [7, 10, 11, 0]
    assert not RewardSchedule.for_rewards(REWARDS[:2], None, [1, 1]).changes
    for weights in ([1] * 3, [1, math.nan, 1, 1]):
        with pytest.raises(ConfigError, match="early_reward_weights .*judge-7b"):
            RewardSchedule.for_rewards(REWARDS, None, weights)


def test_rewards_that_cannot_be_called():
    in_need = gather_groups(vgr_reward, list, 0)
    for reward in (lambda completions, depth, **kwargs: [], get_soft_overlong_punishment, in_need):
        with pytest.raises(RewardError):
            check_callable(reward, ["prompt", "answer"])
    for fits in (accuracy_reward, get_soft_overlong_punishment(10, 2), in_need):
        check_callable(fits, ["prompt", "label_idx", "vgr"])


def test_a_reward_that_names_label_idx_gets_it_where_there_are_choices():
    def mc_idx_reward(completions, label_idx, **kwargs):
        return [-1.0 if index is None else float(index) for index in label_idx]

    check_callable(mc_idx_reward, ["prompt", "choices", "solution"])
    with pytest.raises(RewardError):
        check_callable(mc_idx_reward, ["prompt", "solution"])
    columns = {"completions": ["", "", ""], "choices": [["a", "b"], ["c", "d"], None], "solution": ["B", "c", "7"]}
    assert wrap_reward(mc_idx_reward, "mine", print)(**columns) == [1, 0, -1]
    unusable = {"completions": ["", ""], "choices": [["a", "b"], ["a", "a"]], "solution": ["c", "A"]}
    assert wrap_reward(mc_idx_reward, "mine", print)(**unusable) == [-1, -1]  # which the accuracy reward skips
    assert wrap_reward(mc_idx_reward, "mine", print)(**columns, label_idx=[4, 4, 4]) == [4, 4, 4]


def call(returned, count=2):
    counted = []
    reward = wrap_reward(lambda completions, **kwargs: returned, "mine", lambda *nans: counted.append(nans))
    return reward(completions=["x"] * count, prompts=[]), counted


def test_numbers_of_any_kind_and_nan_is_counted():
    for returned in (np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [True, Fraction(1, 2)]):
        rewards, counted = call(returned)
        assert rewards == [1.0, 0.5]
        assert [type(reward) for reward in rewards] == [float, float]
        assert not counted
    rewards, counted = call([math.nan, None, np.float32("nan"), 1.0], 4)
    assert [math.isnan(reward) for reward in rewards[::2]] == [True, True]
    assert (rewards[1::2], counted) == ([None, 1.0], [("mine", 2)])


NO_NUMBERS = [["no", 1.0], [1.0, [1.0]], [1.0], "12", {1.0, 2.0}, None, ["1", "0.5"], [b"1", 1.0], b"12", [10**400, 1]]


@pytest.mark.parametrize("returned", NO_NUMBERS)
def test_everything_else_is_an_error_with_the_name(returned):
    with pytest.raises(RewardError, match="The reward mine returned "):
        call(returned)


def test_asynchronous_rewards_stay_so():
    async def later(completions, value):
        return [value] * len(completions)

    right, wrong = (wrap_reward(functools.partial(later, value=value), "mine", print) for value in (1, "no"))
    assert asyncio.run(right(completions=["x"] * 2)) == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"^The reward mine returned \['no'\]"):
        asyncio.run(wrong(completions=["x"]))


def test_a_reward_of_ms_swift_gets_strings():
    class Contains:
        def __call__(self, completions, solution, **kwargs):
            return [float(right in text) for text, right in zip(completions, solution, strict=True)]

    async def later(completions, solution, **kwargs):
        return Contains()(completions, solution)

    messages = [[{"role": "assistant", "content": text}] for text in ("It is red.", "No.")]
    columns = {"completions": messages, "solution": ["red", "red"]}
    ported, awaited = (wrap_reward(declares(completion_type=str)(each), "mine", print) for each in (Contains(), later))
    assert ported(**columns) == asyncio.run(awaited(**columns)) == [1.0, 0.0]
    assert wrap_reward(Contains(), "mine", print)(**columns) == [0.0, 0.0]  # a list of messages contains no text


def test_a_reward_that_takes_long_is_reported_and_goes_on(monkeypatch):
    """In a pool of threads, as judges behind a network are asked; it waits until the cure has been named."""
    advised = threading.Event()
    reports = []

    def warn(text):
        reports.append(text)
        if HANGING_ADVICE in text:
            advised.set()

    def asks_judges(completions, **kwargs):
        with ThreadPoolExecutor(2) as judges:
            return list(judges.map(lambda _: float(advised.wait(60)), completions))

    monkeypatch.setattr(logger, "warning", warn)
    limited = wrap_reward(asks_judges, "judge", print, seconds=0.05)
    assert limited(completions=["x", "y"], prompts=["p", "q"], id=["row-1", "row-2"]) == [1.0, 1.0]
    first, last = reports[0], reports[-1]
    assert "The reward judge has not returned" in first
    assert "2 completions, of the rows 'row-1' to 'row-2'" in first
    assert any("in asks_judges" in report for report in reports)  # a busy machine may report before the call
    assert HANGING_ADVICE not in first
    assert HANGING_ADVICE in last
    count = len(reports)
    assert wrap_reward(asks_judges, "judge", print, seconds=60)(completions=["x"]) == [1.0]
    assert len(reports) == count


def test_what_a_reward_does_to_its_arguments_is_undone():
    def careless(completions, solution, choices, completion_ids, meta, **kwargs):
        completions[0][0]["content"] = solution[0]
        completions[1].clear()
        solution[:] = ["x", "y", "z"]
        choices[0].reverse()
        completion_ids[1][:] = []
        meta[0]["boxes"][0].append(5)
        return [1.0, 1.0]

    completions = [[{"role": "assistant", "content": "red"}], [{"role": "assistant", "content": "blue"}]]
    columns = {
        "completions": completions, "prompts": ["", ""], "solution": ["green", "blue"], "choices": [["a", "b"]] * 2,
        "completion_ids": [[1, 2], [3]], "meta": [{"boxes": [[1, 2, 3, 4]]}, None], "image": [object(), object()],
    }  # fmt: skip
    given = {name: (values, copy.copy(values), copy.deepcopy(values)) for name, values in columns.items()}
    assert wrap_reward(careless, "careless", print)(**columns) == [1, 1]
    for name, (values, same_rows, equal_rows) in given.items():
        assert columns[name] is values
        assert all(row is same for row, same in zip(values, same_rows, strict=True))
        assert name == "image" or values == equal_rows


@pytest.mark.parametrize(
    "raised", [SystemExit(0), StopIteration(), KeyError("letter"), RecursionError("deep")], ids=repr
)
def test_what_a_reward_raises_has_its_name(raised):
    def fails(completions, **kwargs):
        raise raised

    async def fails_later(completions, **kwargs):
        raise raised

    message = f"^The reward mine raised {type(raised).__name__}: "
    with pytest.raises(RewardError, match=message):
        wrap_reward(fails, "mine", print)(completions=["x"])
    if not isinstance(raised, StopIteration):  # which a coroutine cannot raise
        with pytest.raises(RewardError, match=message):
            asyncio.run(wrap_reward(fails_later, "mine", print)(completions=["x"]))
