"""Loading rewards by name, dotted path, file and entry point."""

import functools
import pickle
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from vgr_trl import registries
from vgr_trl.rewards import (
    accuracy_reward,
    load_reward,
    load_rewards,
    think_format_reward,
    vgr_hard_negative_reward,
    vgr_reward,
)
from vgr_trl.rewards import loading as registry
from vgr_trl.utils import RewardError

SOURCE = """
import my_helper_{n}
not_callable = 3
class AClass: ...
def my_reward(completions, **kwargs):
    return [my_helper_{n}.value] * len(completions)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["accuracy", "accuracy_reward", "vgr_trl.rewards.accuracy_reward", "vgr_trl.rewards:accuracy_reward"]
)
def test_accuracy_by_every_name(name):
    assert load_reward(name) is accuracy_reward


@pytest.mark.parametrize("name", ["format", "think_format_reward", " vgr_trl.rewards.think_format_reward "])
def test_format_by_every_name(name):
    assert load_reward(name) is think_format_reward


@pytest.mark.parametrize(
    "name", ["length", "soft_overlong", "get_soft_overlong_punishment", "vgr_trl.rewards.get_soft_overlong_punishment"]
)
def test_length_by_every_name(name):
    """Lmax = 100 and c = 20: 90 tokens give −0.5."""
    assert load_reward(name, max_completion_length=100, soft_punish_cache=20)([[1] * 90]) == [-0.5]


def test_length_without_a_cache_takes_a_fifth():
    assert load_reward("length", max_completion_length=100)([[1] * 90, [1] * 80]) == [-0.5, 0.0]


def test_length_needs_the_longest_completion():
    with pytest.raises(
        RewardError, match=r"^The reward 'length' needs max_completion_length, which is None: give it as a"
    ):
        load_reward("length")


def test_several_in_order():
    rewards = load_rewards(["format", "length", accuracy_reward], max_completion_length=10)
    assert [reward.__name__ for reward in rewards] == [
        "think_format_reward", "soft_overlong_punishment_reward", "accuracy_reward",
    ]  # fmt: skip
    assert load_rewards("accuracy") == [accuracy_reward]
    assert load_rewards([]) == []


@pytest.mark.parametrize("names", [["format", "format"], ["accuracy", "format", "accuracy_reward"], ["length"] * 2])
def test_a_reward_named_twice(names):
    with pytest.raises(RewardError, match=f"The reward {names[-1]} is named twice: name it once"):
        load_rewards(names, max_completion_length=8)


def test_unknown_name_lists_names_and_forms():
    with pytest.raises(
        RewardError,
        match=r"^There is no reward 'acuracy'\. Did you mean accuracy\? Else give one of accuracy, accuracy_reward, "
        r"blind_.*, format, .*length,.*, "
        r"or a dotted path or file such as my_package\.rewards\.my_reward or my_rewards\.py:my_reward\.$",
    ):
        load_reward("acuracy")


@pytest.mark.parametrize("spec", ["", " ", ":", ".", "..", ".py:", "a:b:c", "a..b", ".a", "a.", "my_rewards.py"])
def test_malformed_names(spec, folder):
    with pytest.raises(RewardError):
        load_reward(spec)


def test_file_without_function(folder):
    with pytest.raises(
        RewardError, match=r"^The reward 'my.py' is a file: add which function of it, as in my\.py:my_reward"
    ):
        load_reward("my.py")


def test_function_of_a_file(folder):
    (folder / "my_helper_1.py").write_text("value = 5.0")
    (folder / "my_rewards_1.py").write_text(SOURCE.format(n=1))
    relative = load_reward("my_rewards_1.py:my_reward")
    assert relative(["x", "y"]) == [5.0, 5.0]
    assert load_reward(f"{folder}/my_rewards_1.py:my_reward") is relative
    assert load_reward("my_rewards_1.my_reward") is relative
    assert pickle.loads(pickle.dumps(relative)) is relative


def test_file_in_another_folder_with_the_name_of_an_installed_module(folder):
    other = folder / "sub"
    other.mkdir()
    (other / "json.py").write_text("def my_reward(completions, **kwargs): return [0.5]")
    reward = load_reward("sub/json.py:my_reward")
    assert reward([""]) == [0.5]
    assert load_reward("./sub/json.py:my_reward") is reward
    assert pickle.loads(pickle.dumps(reward)) is reward
    assert sys.modules["json"].loads("1") == 1


def test_missing_file(folder):
    with pytest.raises(
        RewardError, match=r"^The file nope\.py of a reward does not exist \(looked for .*nope\.py\): give its"
    ):
        load_reward("nope.py:my_reward")


def test_missing_module(folder):
    with pytest.raises(RewardError, match=r"^There is no module 'no_such_package\.rewards' \(No module named"):
        load_reward("no_such_package.rewards.my_reward")


@pytest.mark.parametrize("source", ["import no_such_dependency", "1 / 0", "def broken(:", "raise SystemExit(3)"])
@pytest.mark.parametrize("form", ["broken_{}.py:f", "broken_{}.f"])
def test_file_that_fails_is_named_with_its_cause(source, form, folder):
    number = abs(hash((source, form)))
    (folder / f"broken_{number}.py").write_text(source)
    for _ in range(2):
        with pytest.raises(
            RewardError, match=rf"^Importing .*broken_{number}\S* for a reward failed with \w+: "
        ) as caught:
            load_reward(form.format(number))
        assert type(caught.value.__cause__).__name__ in str(caught.value)


def test_function_that_a_file_lacks(folder):
    (folder / "my_helper_2.py").write_text("value = 5.0")
    (folder / "my_rewards_2.py").write_text(SOURCE.format(n=2))
    with pytest.raises(
        RewardError, match=r"^my_rewards_2\.py has no reward 'mine': give one of its functions \(my_reward\)\.$"
    ):
        load_reward("my_rewards_2.py:mine")
    with pytest.raises(
        RewardError, match=r"^The reward 'my_rewards_2\.py:not_callable' is of type int: give a function that"
    ):
        load_reward("my_rewards_2.py:not_callable")
    with pytest.raises(RewardError, match=r"^The reward 'my_rewards_2\.AClass' is a class: give a function that takes"):
        load_reward("my_rewards_2.AClass")
    with pytest.raises(RewardError, match=r"^The reward 3 is of type int: give a function"):
        load_reward(3)


class _Package:
    def __init__(self, name):
        self.name = name


def _entry(name, value, package):
    return EntryPoint(name, value, "vgr_trl.rewards")._for(_Package(package))


@pytest.fixture
def register(monkeypatch):
    def install(*entries):
        def found(**query):
            return EntryPoints(entries).select(**query)

        monkeypatch.setattr(registries, "entry_points", found)

    return install


def test_entry_point_of_another_package(register):
    register(_entry("neat", "functools:partial.__call__", "neat-rewards"), _entry("count", "builtins:len", "counting"))
    assert load_reward("count") is len
    with pytest.raises(RewardError, match=r"give one of accuracy, .*count, .*neat, "):
        load_reward("nope")


def test_name_of_two_packages(register):
    register(_entry("neat", "one.rewards:neat", "one"), _entry("neat", "two:neat", "two"))
    message = (
        "The reward 'neat' is registered more than once, by one (one.rewards:neat) and by two (two:neat): give the one "
        "you mean as a dotted path, such as one.rewards.neat."
    )
    with pytest.raises(RewardError, match=re.escape(message)):
        load_reward("neat")


def test_name_of_this_library_taken_by_another_package(register):
    own = _entry("accuracy", "vgr_trl.rewards.accuracy:accuracy_reward", "vgr_trl")
    register(own, own)
    assert load_reward("accuracy") is accuracy_reward
    register(own, _entry("accuracy", "rival:accuracy", "rival"))
    with pytest.raises(
        RewardError, match=r"^The reward 'accuracy' is registered more than once, by vgr_trl and by rival \(rival"
    ):
        load_reward("accuracy")


def test_entry_point_that_cannot_be_imported(register):
    register(_entry("neat", "no_such_package:neat", "neat-rewards"))
    with pytest.raises(
        RewardError, match=r"^The reward 'neat' of neat-rewards cannot be imported \(ModuleNotFoundError: No"
    ):
        load_reward("neat")


def test_a_callable_is_returned_as_it_is():
    partial = functools.partial(accuracy_reward)
    assert load_reward(partial) is partial


def test_hard_negatives_take_the_place_of_vgr():
    own = functools.partial(accuracy_reward)
    assert registry.hardened([own, "vgr"]) == [own, "vgr_hard_negative"]
    assert registry.hardened([accuracy_reward, vgr_reward]) == [accuracy_reward, vgr_hard_negative_reward]
    assert registry.hardened(["vgr_hard_negative_reward"]) == ["vgr_hard_negative_reward"]
    with pytest.raises(RewardError, match="the reward functions are accuracy partial: name vgr there"):
        registry.hardened(["accuracy", own])


def test_installed_entry_points_are_the_functions():
    from importlib.metadata import entry_points

    loaded = {entry.name: entry.load() for entry in entry_points(group="vgr_trl.rewards")}
    assert loaded["accuracy"] is accuracy_reward
    assert loaded["format"] is think_format_reward


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
