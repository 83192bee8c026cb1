"""What rewards return: numbers and None pass, NaN is counted, everything else is an error with the function's name."""

import asyncio
import contextlib
import copy
import functools
import math
import signal
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from math_verify import parse, verify

from vgr_trl.rewards.loading import checked
from vgr_trl.utils import RewardError


def call(returned, count=2):
    heard = []
    rewards = checked(lambda completions, **kwargs: returned, "mine", lambda *said: heard.append(said))(
        completions=["x"] * count, prompts=[]
    )
    return rewards, heard


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5], (1.0, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [np.float32(1), Fraction(1, 2)],
        [True, torch.tensor(0.5)], [np.int64(1), np.array(0.5)], iter([1, 0.5]),
    ],
)  # fmt: skip
def test_numbers_of_any_kind(returned):
    rewards, heard = call(returned)
    assert rewards == [1.0, 0.5]
    assert [type(reward) for reward in rewards] == [float, float]
    assert not heard


def test_what_a_reward_does_to_its_arguments_is_undone():
    def careless(completions, solution, **kwargs):
        completions[0][0]["content"] = solution[0]
        completions[1].clear()
        solution[:] = ["x", "y", "z"]
        return [1.0, 1.0]

    def careless_within_rows(choices, completion_ids, meta, **kwargs):
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
    for reward in (careless, careless_within_rows):
        assert checked(reward, "careless", print)(**columns) == [1, 1]
    for name, (values, same_rows, equal_rows) in given.items():
        assert columns[name] is values
        assert all(row is same for row, same in zip(values, same_rows, strict=True))
        assert name == "image" or values == equal_rows


def test_a_number_beyond_floats_is_infinite_which_all_processes_refuse_together():
    assert call([10**400, -(10**400)])[0] == [math.inf, -math.inf]


def test_nan_is_told_and_none_is_not():
    rewards, heard = call([math.nan, None, np.float32("nan"), 1.0], 4)
    assert [math.isnan(reward) for reward in rewards[::2]] == [True, True]
    assert rewards[1::2] == [None, 1.0]
    assert heard == [("mine", 2)]
    assert call([None, None]) == ([None, None], [])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["1.0", 1.0], r"The reward mine returned '1.0' (str) for completion 0: give a number, or None where it does"),
        ([1.0, [0.5]], "The reward mine returned [0.5] (list) for completion 1: give a number"),
        ([1.0, torch.ones(1)], "The reward mine returned tensor([1.]) (Tensor) for completion 1: give a number"),
        ([1.0, 1j], "The reward mine returned 1j (complex) for completion 1"),
        ([1.0, "x" * 200], "The reward mine returned '" + "x" * 76 + "... (str) for completion 1"),
        ([1.0], "The reward mine returned 1 rewards: return a list of one number per completion (2), None where"),
        ([1.0, 1.0, 1.0], "The reward mine returned 3 rewards: return a list"),
        ("ab", "The reward mine returned 'ab' (str): return a list of one number per completion (2)"),
        ({0: 1.0, 1: 2.0}, "The reward mine returned {0: 1.0, 1: 2.0} (dict): return a list"),
        ({1.0, 2.0}, "The reward mine returned {1.0, 2.0} (set): return a list"),
        (1.0, "The reward mine returned 1.0 (float): return a list"),
        (None, "The reward mine returned None (NoneType): return a list"),
    ],
)
def test_everything_else_is_an_error_with_the_name(returned, message):
    with pytest.raises(RewardError) as error:
        call(returned)
    assert str(error.value).startswith(message)


async def later(completions, value, **kwargs):
    return [value] * len(completions)


class Later:
    async def __call__(self, completions, **kwargs):
        return await later(completions, "no")


def test_asynchronous_rewards_stay_so():
    right = checked(functools.partial(later, value=1), "mine", print)
    assert asyncio.run(right(completions=["x"] * 2)) == [1.0, 1.0]
    for wrong in (functools.partial(later, value="no"), Later()):
        with pytest.raises(RewardError, match=r"^The reward mine returned 'no' \(str\) for completion 0"):
            asyncio.run(checked(wrong, "mine", print)(completions=["x"]))


def test_the_trainer_reaches_rewards_that_take_it():
    """Those of our users' scripts read `kwargs["trainer"]`; others are called as before."""
    trainer = object()

    def by_name(completions, trainer, **kwargs):
        return [1.0 if trainer is given else 0.0 for given in [kwargs["expected"]] for _ in completions]

    def among_others(completions, **kwargs):
        return [1.0 if kwargs["trainer"] is kwargs["expected"] else 0.0 for _ in completions]

    def without(completions, expected):
        return [1.0 for _ in completions]

    bound = functools.partial(by_name, trainer="bound")
    for reward, expected in ((by_name, trainer), (among_others, trainer), (without, None), (bound, "bound")):
        call = checked(reward, "mine", lambda *said: None, trainer=trainer)
        assert call(completions=["x", "y"], expected=expected) == [1.0, 1.0]
    unused = checked(lambda completions, **kwargs: [float("trainer" in kwargs)], "mine", lambda *said: None)
    assert unused(completions=["x"]) == [0.0]


def test_a_wrapper_that_hands_on_its_own_trainer_gets_none():
    def reward(completions, trainer, **kwargs):
        return [trainer] * len(completions)

    def wrapper(completions, **kwargs):
        return reward(completions=completions, trainer=2.0, **kwargs)

    async def waiting(completions, **kwargs):
        return reward(completions=completions, trainer=2.0, **kwargs)

    call = checked(wrapper, "wrapper", print, trainer=1.0)
    assert call(completions=["a", "b"]) == call(completions=["a", "b"]) == [2.0, 2.0]
    assert asyncio.run(checked(waiting, "waiting", print, trainer=1.0)(completions=["a"])) == [2.0]

    def broken(completions, **kwargs):
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        checked(broken, "broken", print, trainer=1.0)(completions=["a"])


def hang():
    threading.Event().wait(900)


def after_math_verify(completions, **kwargs):
    verify(parse("$1$"), parse("$2$"))
    hang()


def after_an_alarm_of_its_own(completions, **kwargs):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(900)
    signal.alarm(0)
    hang()


def catching_everything(completions, **kwargs):
    for _ in completions:
        with contextlib.suppress(BaseException):
            hang()
    return [1.0] * len(completions)


class Hangs:
    def __del__(self):
        hang()


def in_del(completions, **kwargs):
    for _ in completions:
        Hangs()
    return [1.0] * len(completions)


def in_a_generator(completions, **kwargs):
    for _ in completions:
        hang()
        yield 1.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "reward", [after_math_verify, after_an_alarm_of_its_own, catching_everything, in_del, in_a_generator]
)
def test_a_limit_holds_whatever_the_reward_does(reward):
    parse("$1$")  # the first time it takes longer than the limit
    alarm, urgent = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGURG)
    limited = checked(reward, "mine", print, seconds=0.2)
    try:
        with pytest.raises(RewardError, match="The reward mine has not returned within reward_timeout=0.2 seconds"):
            limited(completions=["x"] * 3, prompts=[])
    finally:
        signal.signal(signal.SIGALRM, alarm)
    assert signal.getsignal(signal.SIGURG) is urgent
