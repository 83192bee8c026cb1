"""Configurations of EasyR1, MTRL, VPPO and verl; expected values follow from their documentation and code by hand."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from vgr_trl.cli.arguments import DataArguments, RewardArguments
from vgr_trl.config_converters import KEYS, NAMES, VERL_DEFAULTS, VERL_NAMES, convert, flat, is_convertible
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.utils import ConfigError

EASYR1 = Path(__file__).with_name("easyr1_keys.txt").read_text().splitlines()[1:]
ENOUGH = {
    "data.train_files": "some/questions@train",
    "worker.actor.model.model_path": "some/model",
    "worker.reward.reward_function": "./math.py:compute_score",
    "worker.rollout.n": 5,
}


def converted(processes=1, **given):
    return convert({**ENOUGH, **{key.replace("__", "."): value for key, value in given.items()}}, processes)


def test_every_key_of_easyr1_is_known():
    assert len(EASYR1) == 193
    assert set(EASYR1) <= set(KEYS)
    assert set(NAMES.values()) <= set(KEYS)
    assert {key for key, _ in VERL_NAMES.values()} | set(VERL_DEFAULTS) <= set(KEYS)
    assert all(key.option or key.why or key.is_computed for key in KEYS.values())


def test_every_option_that_comes_out_is_one_of_ours():
    known = {
        option.name for group in (DAPOConfig, DataArguments, RewardArguments, ModelConfig) for option in fields(group)
    }
    found = converted(
        data__val_files="other/questions", data__format_prompt="a.jinja", algorithm__online_filtering=True,
        algorithm__filter_key="accuracy", worker__actor__model__lora__rank=8, trainer__val_freq=5,
        trainer__save_freq=5, trainer__save_limit=2, worker__actor__optim__lr_scheduler_type="cosine",
        worker__actor__optim__min_lr_ratio=0.1, algorithm__kl_type="adaptive", worker__reward__reward_type="batch",
        worker__reward__reward_function_kwargs={"a": 1}, worker__rollout__val_override_config={"temperature": 0.6},
        trainer__load_checkpoint_path="x", trainer__max_steps=3,
    )  # fmt: skip
    every = {**found.options, **converted(worker__actor__loss_type="sapo", worker__actor__loss_avg_mode="seq").options}
    every |= {key.option: None for key in KEYS.values() if key.option}
    assert set(every) <= known
    assert len(every) > 60


def test_batches_are_the_same_however_many_processes():
    """512 prompts of 5 completions, 128 an update: 640 completions an update, 4 updates a rollout."""
    given = {"data__rollout_batch_size": 512, "worker__actor__global_batch_size": 128,
             "worker__actor__micro_batch_size_per_device_for_update": 4, "trainer__max_steps": 10,
             "trainer__save_freq": 5, "worker__actor__optim__lr_warmup_steps": 3}  # fmt: skip
    for processes, accumulation, generation in ((1, 160, 640), (8, 20, 80)):
        options = converted(processes, **given).options
        assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] * processes == 640
        assert (options["gradient_accumulation_steps"], options["steps_per_generation"]) == (accumulation, generation)
        assert (options["max_steps"], options["save_steps"], options["warmup_steps"]) == (40, 20, 12)
        assert (options["logging_steps"], options["num_generations"]) == (4, 5)
    with pytest.raises(ConfigError, match="An update takes 640 completions .* 3 processes with 4 at a time"):
        converted(3, **given)
    with pytest.raises(ConfigError, match="a rollout is a multiple"):
        converted(**{**given, "worker__actor__global_batch_size": 100})


def test_defaults_are_theirs_not_ours():
    options = converted(worker__rollout__name="vllm").options
    assert options["learning_rate"] == 1e-6
    assert options["lr_scheduler_type"] == "constant_with_warmup"
    assert (options["epsilon"], options["epsilon_high"], options["delta"]) == (0.2, 0.3, 3.0)
    assert (options["kl_coef"], options["kl_penalty"], options["use_kl_loss"]) == (1e-3, "kl", False)
    assert (options["system_prompt_file"], options["choices_key"]) == ("none", "none")
    assert options["output_dir"] == "checkpoints/easy_r1/demo"
    assert options["vllm_importance_sampling_correction"] is False
    assert options["num_train_epochs"] == 15


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "gspo"}, {"loss_type": "dapo", "importance_sampling_level": "sequence"}),
        ({"loss_type": "gspo_token", "loss_avg_mode": "seq"}, {"loss_type": "grpo", "epsilon_high": 0.3}),
        (
            {"loss_type": "cispo", "clip_ratio_low": None, "clip_ratio_high": 4},
            {"loss_type": "cispo", "epsilon_high": 5},
        ),
        ({"loss_type": "sapo", "loss_avg_mode": "seq"}, {"loss_type": "sapo", "sapo_temperature_neg": 1.05}),
    ],
)
def test_losses(given, expected):
    found = converted(**{f"worker__actor__{name}": value for name, value in given.items()})
    assert found.refused == {}
    assert {name: found.options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("worker.actor.loss_type", "cispo", "bounds the ratio of cispo from below"),
        ("worker.actor.loss_type", "sapo", "a mean over completions"),
        ("worker.actor.loss_type", "dppo", "here it can be default, gspo"),
        ("algorithm.adv_estimator", "reinforce_plus_plus", "EasyR1's has no baseline"),
        ("trainer.critic_warmup", 3, "though there is no critic"),
        ("worker.rollout.n", 1, "at least 2 completions"),
        ("worker.actor.optim.strategy", "adamw_bf16", "the rounding of bfloat16 weights"),
        ("algorithm.kl_penalty", "full", "here it can be kl, abs, mse, low_var_kl"),
    ],
)
def test_what_would_train_something_else_is_refused(key, value, why):
    assert any(why in reason for reason in convert({**ENOUGH, key: value}).refused.values())


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("worker.actor.ulysses_size", 2, "sequence parallelism is refused"),
        ("trainer.ray_timeline", "x.json", "no Ray"),
        ("worker.actor.clip_ratio_lwo", 0.2, "Did you mean worker.actor.clip_ratio_low"),
        ("worker.rollout.val_override_config", {"top_k": 5}, "no top_k of their own"),
        ("worker.reward.skip_special_tokens", False, "without special tokens"),
    ],
)
def test_what_has_no_meaning_here_is_named(key, value, why):
    found = convert({**ENOUGH, key: value})
    assert list(found.stopped) == [key]
    assert why in found.stopped[key]
    assert any(line.key == key and line.value.startswith("stops") for line in found.lines)
    assert convert(ENOUGH).stopped == convert(ENOUGH).refused == {}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("algorithm.disable_kl", "flase", "is 'flase': give true or false"),
        ("algorithm.disable_divergence", "no", "algorithm.disable_divergence is 'no': give true or false"),
        ("trainer.val_only", 1, "is 1: give true or false"),
        ("algorithm.kl_coef", "much", "is 'much': give a number"),
        ("worker.actor.optim.lr", [1e-6], "give a number"),
        ("worker.rollout.temperature", True, "is True: give a number"),
        ("trainer.logger", 5, "is of another kind than EasyR1's, where run is read"),
        ("worker.actor.optim.betas", 5, "is of another kind than EasyR1's, where optimizer is read"),
    ],
)
def test_switches_and_numbers_that_are_none(key, value, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        convert({**ENOUGH, key: value})


def test_numbers_in_quotes_are_numbers():
    assert convert({**ENOUGH, "algorithm.kl_coef": "1e-2"}).options["kl_coef"] == 0.01


def test_filtering_by_another_score_makes_it_a_reward_without_weight():
    options = converted(algorithm__online_filtering=True, algorithm__filter_key="accuracy").options
    assert options["reward_funcs"] == ["./math.py:compute_score", "./math.py:compute_score[accuracy]"]
    assert options["reward_weights"] == [1.0, 0.0]
    assert (options["filter_key"], options["dynamic_sampling_max_rounds"]) == ("accuracy", 19)


def test_sources_of_data(tmp_path):
    (tmp_path / "a.jsonl").touch()
    folder, file = str(tmp_path), str(tmp_path / "a.jsonl")
    cases = [
        ("hub/a@train", "hub/a@test", {"dataset_name": "hub/a", "dataset_test_split": "test"}, {"test_dataset"}),
        ("hub/a", "hub/b", {"dataset_name": "hub/a", "test_dataset": "hub/b", "dataset_test_split": "train"}, set()),
        (f"{file},b.jsonl", "c.jsonl", {"data_files": f"train={file}+b.jsonl,test=c.jsonl"}, {"test_dataset"}),
        (folder, file, {"dataset_path": folder, "test_dataset": file}, {"data_files"}),
    ]
    for train, test, expected, absent in cases:
        options = converted(data__train_files=train, data__val_files=test).options
        assert {name: options.get(name) for name in expected} == expected
        assert not absent & set(options)
    with pytest.raises(ConfigError, match="several parts must all be files"):
        converted(data__train_files="hub/a,hub/b")


def test_evaluations():
    given = {"data__val_files": "some/questions@test", "data__rollout_batch_size": 512,
             "worker__actor__global_batch_size": 256}  # fmt: skip
    options = converted(**given, trainer__val_freq=5).options
    assert (options["eval_strategy"], options["eval_steps"], options["eval_on_start"]) == ("steps", 10, True)
    assert converted(**given, trainer__val_before_train=False).options["eval_strategy"] == "no"
    sampling = {"temperature": 0, "n": 4, "do_sample": False}
    options = converted(**given, worker__rollout__val_override_config=sampling).options
    assert (options["num_generations_eval"], options["eval_temperature"]) == (4, 0)
    assert converted().options["eval_strategy"] == "no"


def test_adapters():
    options = converted(worker__actor__model__lora__rank=64).options
    assert (options["lora_r"], options["lora_alpha"], options["lora_dropout"]) == (64, 64, 0.0)
    assert options["lora_target_modules"] == ["all-linear"]
    given = {"rank": 8, "target_modules": "q_proj,v_proj", "exclude_modules": ".*visual.*"}
    (pattern,) = converted(**{f"worker__actor__model__lora__{k}": v for k, v in given.items()}).options[
        "lora_target_modules"
    ]
    matches = {
        name: bool(re.fullmatch(pattern, name))
        for name in ("model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.0.q_proj", "x.k_proj")
    }
    assert list(matches.values()) == [True, False, False]


MTRL = """
dataset: {train_files: hub/a, val_files: hub/a@test, max_response_length: 256, rollout_batch_size: 256}
training: {total_epochs: 10, project_name: mtrl_training, experiment_name: vl}
optimization:
  advantage_estimator: grpo
  divergence_coef: 0.01
  divergence_type: adaptive
  divergence_target: 6.0
  enable_perception_filtering: true
  enable_trajectory_reweighting: true
  trajectory_scaling_min: 0.8
worker:
  actor:
    model: {model_path: some/model, peft_type: lora, lora_rank: 8, lora_alpha: 16, lora_dropout: 0.05,
            lora_target_modules: [q_proj, v_proj]}
    optim: {lr: 1.0e-6, warmup_steps: 10, lr_scheduler_type: constant_with_warmup}
    fsdp: {sharding_strategy: FULL_SHARD, mixed_precision_dtype: bf16, cpu_offload: false}
    global_batch_size: 256
  rollout: {n: 8, enable_prefix_caching: true}
  reward: {reward_type: function, reward_fn_path: reward.py, num_cpus: 4}
"""


def test_mtrl():
    """One update a rollout; the divergence in the rewards, as use_divergence_loss is off by default."""
    found = convert(flat(yaml.safe_load(MTRL)))
    assert (found.stopped, found.refused) == ({}, {})
    options = found.options
    expected = {
        "kl_coef": 0.01, "kl_type": "adaptive", "kl_target": 6.0, "use_kl_loss": False, "warmup_steps": 10,
        "enable_trajectory_reweighting": True, "reward_funcs": ["reward.py:reward_function"], "reward_num_cpus": 4,
        "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05, "bf16": True,
        "output_dir": "checkpoints/mtrl_training/vl",
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert any(line.key == "optimization.divergence_coef" and line.ours == "kl_coef" for line in found.lines)
    with pytest.raises(ConfigError, match="divergence_coef is 0.01 and algorithm.kl_coef, which means the same, 0.1"):
        convert({"optimization.divergence_coef": 0.01, "algorithm.kl_coef": 0.1})


def test_vppo_shapes_trajectories_with_perception_alone():
    """In their update the trajectories are scaled only where perception filtering is on."""
    names = {"algorithm__use_advantage_shaping": True, "algorithm__advantage_scaling_min": 0.9}
    assert converted(**names).options["enable_trajectory_reweighting"] is False
    options = converted(**names, algorithm__use_vppo_on_perception=True).options
    assert (options["enable_trajectory_reweighting"], options["trajectory_scaling_min"]) == (True, 0.9)


def test_a_critic():
    """Two updates a rollout; theirs lets the policy wait while the step is below critic_warmup: twice for 3."""
    given = {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95, "trainer.critic_warmup": 3,
             "worker.critic.optim.lr": 1e-5, "worker.critic.optim.lr_warmup_steps": 5,
             "worker.critic.cliprange_value": 0.2}  # fmt: skip
    found = convert({**ENOUGH, **given})
    assert (found.stopped, found.refused) == ({}, {})
    expected = {"advantage_estimator": "gae", "lam": 0.95, "gamma": 1.0, "critic": "model", "critic_warmup": 4,
                "critic_learning_rate": 1e-5, "critic_warmup_steps": 10, "cliprange_value": 0.2}  # fmt: skip
    assert {name: found.options[name] for name in expected} == expected
    other = {"worker.critic.model.model_path": "other", "worker.critic.ppo_epochs": 2}
    assert set(convert({**ENOUGH, **given, **other}).refused) == set(other)


def test_a_default_that_nobody_wrote_stops_nothing(monkeypatch):
    """Theirs: 256 prompts an update for a critic, 4 completions a pass, vLLM on 2 GPUs, and wandb."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = {"worker.actor.global_batch_size": 2, "worker.actor.ppo_epochs": 2, "worker.rollout.n": 3}
    found = convert({**ENOUGH, **given, "algorithm.adv_estimator": "gae", "worker.actor.optim.weight_decay": 0.1})
    assert (found.stopped, found.refused) == ({}, {})
    assert (found.options["per_device_train_batch_size"], found.options["gradient_accumulation_steps"]) == (3, 2)
    assert (found.options["use_vllm"], found.options["report_to"]) == (False, ["none"])
    stated = {"worker.rollout.name": "vllm", "trainer.logger": ["wandb"]}
    options = convert({**ENOUGH, **stated}).options
    assert (options["use_vllm"], options["report_to"]) == (True, ["wandb"])
    for processes, size in ((1, 1), (4, 2)):
        options = convert({**ENOUGH, **stated, "worker.actor.global_batch_size": 64}, processes).options
        assert options["vllm_tensor_parallel_size"] == size
    with pytest.raises(ConfigError, match="cannot share evenly"):
        convert({**ENOUGH, **given, "worker.actor.micro_batch_size_per_device_for_update": 4})


def test_what_stops_names_the_key_to_add():
    refused = convert({key: value for key, value in ENOUGH.items() if key != "worker.rollout.n"}).refused
    assert refused.keys() == {"worker.rollout.n"}
    assert "give worker.rollout.n=8" in refused["worker.rollout.n"]
    with pytest.raises(ConfigError, match="add worker.actor.global_batch_size, whose default"):
        converted(data__rollout_batch_size=128)
    with pytest.raises(ConfigError, match="add data.rollout_batch_size, whose default"):
        converted(worker__actor__global_batch_size=48)


def test_verl_names_with_verl_defaults():
    given = {
        "data.train_files": "hub/a", "actor_rollout_ref.model.path": "some/model", "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 512, "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.rollout.val_kwargs": {"do_sample": False}, "trainer.test_freq": 5,
    }  # fmt: skip
    found = convert(given)
    assert found.refused == {}
    assert list(found.stopped) == ["worker.reward.reward_function"]
    expected = {"kl_coef": 1e-3, "kl_penalty": "low_var_kl", "use_kl_loss": True, "epsilon_high": 0.2,
                "num_train_epochs": 30, "num_generations": 5, "loss_type": "dapo"}  # fmt: skip
    assert {name: found.options[name] for name in expected} == expected
    assert convert({**given, "actor_rollout_ref.actor.use_kl_loss": False}).options["kl_coef"] == 0.0
    found = convert({**given, "algorithm.adv_estimator": "gae"})
    assert (found.refused, found.options["critic_learning_rate"]) == ({}, 1e-5)
    assert "actor_rollout_ref.actor.megatron.x" in convert({**given, "actor_rollout_ref.actor.megatron.x": 1}).stopped


def test_files_of_ours_are_not_converted():
    assert not is_convertible({"learning_rate": 1e-5, "model_init_kwargs": {"a": 1}})
    assert not is_convertible(None)
    assert is_convertible(yaml.safe_load(MTRL))
