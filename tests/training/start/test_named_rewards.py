"""Rewards that a trainer in Python is given by name, as on the command line; other texts are TRL's reward models."""

from support.trainers import config

from vgr_trl.rewards import accuracy_reward
from vgr_trl.validate import plan_rewards


def planned(folder, *rewards):
    return plan_rewards(list(rewards), config(folder, reward_weights=[1.0] * len(rewards)), lambda: 4)[0]


def test_names_files_and_dotted_paths_are_functions(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def half(completions, **columns):\n    return [0.5] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    named, of_file, dotted, length = planned(
        tmp_path, "accuracy", "mine.py:half", "vgr_trl.rewards:think_format_reward", "length"
    )
    assert named is accuracy_reward
    assert of_file(completions=["a", "b"]) == [0.5, 0.5]
    assert dotted.__name__ == "think_format_reward"
    assert length.__name__ == "soft_overlong_punishment_reward"


def test_models_and_functions_stay_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "accuracy").mkdir()
    monkeypatch.chdir(tmp_path)
    given = ["accuracy", "org/reward-model", "gpt2", accuracy_reward]
    assert planned(tmp_path, *given) == given
