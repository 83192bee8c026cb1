"""What the stages answer to stand-ins of a trainer: rewards, numbers of the mode, what a buffer needs, prompts."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from vgr_trl import DAPOTrainer
from vgr_trl.checkpoints import _behind
from vgr_trl.rewards import vgr_reward
from vgr_trl.rewards.groups import WholeGroups
from vgr_trl.utils import ConfigError
from vgr_trl.validate import check_data, make_data_ready


def test_a_greedy_completion_has_none_to_be_compared_with():
    """And reward models stay as they are."""
    rewards = [torch.nn.Linear(1, 1), WholeGroups(vgr_reward, lambda rows: rows, 0, lambda: 2)]
    trainer = SimpleNamespace(
        reward_funcs=rewards, reward_func_names=["model", "vgr"], args=SimpleNamespace(reward_timeout=None),
        _warn_of_nan=print,
    )  # fmt: skip
    found = DAPOTrainer._checked_rewards(trainer, SimpleNamespace(greedy=True))
    assert found[0] is rewards[0]
    assert found[1](completions=["a", "b"]) == [0.0, 0.0]


def test_a_stream_that_begins_anew_is_not_resumed():
    """At the end of its first epoch it has, before it has not."""
    args = SimpleNamespace(gradient_accumulation_steps=1, steps_per_generation=1, ignore_data_skip=False)
    trainer = SimpleNamespace(
        args=args, num_iterations=1, state=SimpleNamespace(global_step=3, epoch=1.0),
        train_dataset=IterableDataset.from_generator(lambda: iter(())),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"saved in a later epoch of the stream \(1.00\)"):
        _behind(trainer, "checkpoint-3")
    trainer.state.epoch = 0.99
    assert _behind(trainer, "checkpoint-3") == (0, 3)


def test_long_prompts_leave_every_evaluation_set():
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "a b c"}])
    trainer = SimpleNamespace(
        train_dataset=None, eval_dataset=DatasetDict(one=rows, other=rows), _is_vlm=False,
        reward_funcs=[], environment_factories=None, rollout_func=None,
        args=SimpleNamespace(max_prompt_length=2, prompts_per_rollout=1),
    )  # fmt: skip
    lengths = {"a": 1, "a b c": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vgr_trl.validate.prompt_length", lambda _, row: lengths[row["prompt"]])
        check_data(trainer, ())
    assert isinstance(trainer.eval_dataset, DatasetDict)
    assert {name: part["prompt"] for name, part in trainer.eval_dataset.items()} == {"one": ["a"], "other": ["a"]}


@pytest.mark.parametrize("maker", ["environment_factories", "rollout_func"])
def test_prompts_that_are_made_elsewhere_are_not_looked_at(maker):
    makers = {"environment_factories": None, "rollout_func": None, maker: print}
    rows = Dataset.from_list([{"unknown": 1}])
    trainer = SimpleNamespace(train_dataset=rows, **makers)
    make_data_ready(trainer)
    assert trainer.train_dataset is rows
