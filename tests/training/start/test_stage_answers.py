"""What the stages answer to stand-ins of a trainer: rewards, numbers of the mode, what a buffer needs, prompts."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from vgr_trl import DAPOConfig
from vgr_trl.prepare import _why_no_attention, drop_prompts_over_limit, make_data_ready
from vgr_trl.resume import _behind
from vgr_trl.rewards import vgr_reward
from vgr_trl.rewards.groups import WholeGroups
from vgr_trl.rollout import TRLHost
from vgr_trl.sampling import why_unusable
from vgr_trl.signals import Wanted
from vgr_trl.trainer import Judge
from vgr_trl.utils import ConfigError


class TestJudge:
    host = SimpleNamespace(reward_names=["model", "vgr"], args=SimpleNamespace(reward_timeout=None))

    def guarded(self, greedy):
        rewards = [torch.nn.Linear(1, 1), WholeGroups(vgr_reward, lambda rows: rows, 0, 1, lambda: 2)]
        return rewards, Judge(self.host, None, None, None, None).guarded(rewards, SimpleNamespace(greedy=greedy))

    def test_reward_models_stay_as_they_are(self):
        rewards, guarded = self.guarded(greedy=False)
        assert guarded[0] is rewards[0]
        assert guarded[1] is not rewards[1]

    def test_a_greedy_completion_has_none_to_be_compared_with(self):
        assert self.guarded(greedy=True)[1][1](completions=["a", "b"]) == [0.0, 0.0]


@pytest.mark.parametrize(("training", "expected"), [(True, 8), (False, 2)])
def test_completions_per_prompt_of_the_mode(training, expected):
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=training), num_generations=8, num_generations_eval=2,
        _metrics={"train": {"reward": [1.0, 8.0], "empty": []}, "eval": {"reward": [2.0]}},
    )  # fmt: skip
    host = TRLHost.__new__(TRLHost)
    host.trainer = trainer
    assert host.num_generations == expected
    assert host.newest_metrics() == {"reward": float(expected)}


@pytest.mark.parametrize("missing", ["importance_sampling_ratio", "sampling_per_token_logps", "old_per_token_logps"])
def test_groups_without_what_vllm_needs(missing, tmp_path):
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "bf16": False, "use_cpu": True}
    args = DAPOConfig(output_dir=str(tmp_path), use_vllm=True, **sizes)
    names = {"importance_sampling_ratio", "sampling_per_token_logps", "old_per_token_logps"}
    rows = {"columns": {name: torch.ones(2, 1) for name in names - {missing}}, "images": [None, None]}
    state = {"groups": [{"advantages": [1.0, -1.0], "rows": rows}]}
    needer = "replay_buffer_size" if missing.startswith("old") else "vLLM"
    assert why_unusable(state, SimpleNamespace(args=args), Wanted()) == (
        f"its groups have no {missing}, which {needer} needs"
    )


def test_a_stream_that_begins_anew_is_not_resumed():
    """At the end of its first epoch it has, before it has not."""
    args = SimpleNamespace(gradient_accumulation_steps=1, steps_per_generation=1, ignore_data_skip=False)
    trainer = SimpleNamespace(
        args=args, num_iterations=1, state=SimpleNamespace(global_step=3, epoch=1.0),
        train_dataset=IterableDataset.from_generator(lambda: iter(())),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"saved after the stream had begun anew \(epoch 1.00\)"):
        _behind(trainer, "checkpoint-3")
    trainer.state.epoch = 0.99
    assert _behind(trainer, "checkpoint-3") == (0, 3)


def test_attention_needs_the_token_of_images():
    assert "give it as vision_token_ids" in _why_no_attention(SimpleNamespace(), ())


def test_long_prompts_leave_every_evaluation_set():
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "a b c"}])
    trainer = SimpleNamespace(
        train_dataset=None, eval_dataset=DatasetDict(one=rows, other=rows), _is_vlm=False,
        processing_class=SimpleNamespace(), chat_template=None,
    )  # fmt: skip
    lengths = {"a": 1, "a b c": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vgr_trl.prepare.prompt_length", lambda _, row: lengths[row["prompt"]])
        drop_prompts_over_limit(trainer, 2, lambda: None)
    assert isinstance(trainer.eval_dataset, DatasetDict)
    assert {name: part["prompt"] for name, part in trainer.eval_dataset.items()} == {"one": ["a"], "other": ["a"]}


@pytest.mark.parametrize("maker", ["environment_factories", "rollout_func"])
def test_prompts_that_are_made_elsewhere_are_not_looked_at(maker):
    makers = {"environment_factories": None, "rollout_func": None, maker: print}
    rows = Dataset.from_list([{"unknown": 1}])
    trainer = SimpleNamespace(train_dataset=rows, **makers)
    make_data_ready(trainer)
    assert trainer.train_dataset is rows
