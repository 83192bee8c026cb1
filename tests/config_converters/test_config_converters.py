"""Configurations of EasyR1, MTRL, VPPO and verl; expected values follow from their documentation and code by hand."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from vgr_trl.cli.arguments import DataArguments, RewardArguments
from vgr_trl.config_converters import (
    EASYR1_KEYS,
    EASYR1_NAMES,
    VERL_DEFAULTS,
    VERL_NAMES,
    convert,
    flatten,
    is_convertible,
    read_configuration,
)
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.integrations.verl.credit import OPTION_ALIASES
from vgr_trl.utils import ConfigError

EASYR1 = Path(__file__).with_name("easyr1_keys.txt").read_text().splitlines()[1:]
ENOUGH = {
    "data.train_files": "some/questions@train",
    "worker.actor.model.model_path": "some/model",
    "worker.reward.reward_function": "./math.py:compute_score",
    "worker.rollout.n": 5,
}
LORA, ACTOR, OPTIM = "worker.actor.model.lora", "worker.actor", "worker.actor.optim"
SIZES = {"data.rollout_batch_size": 512, "worker.actor.global_batch_size": 128}
MICRO = "worker.actor.micro_batch_size_per_device_for_update"


def options_of(given=(), processes=1):
    found = convert({**ENOUGH, **dict(given)}, processes)
    assert (found.unsupported, found.refused) == ({}, {})
    assert set(found.options) <= {
        option.name for group in (DAPOConfig, DataArguments, RewardArguments, ModelConfig) for option in fields(group)
    }
    return found.options


def test_every_key_of_easyr1_is_known():
    assert len(EASYR1) == 193
    assert set(EASYR1) <= set(EASYR1_KEYS)
    assert set(EASYR1_NAMES.values()) <= set(EASYR1_KEYS)
    assert {key for key, _ in VERL_NAMES.values()} | set(VERL_DEFAULTS) <= set(EASYR1_KEYS)
    assert all(key.option or key.why or key.is_computed for key in EASYR1_KEYS.values())


def test_batches_are_the_same_however_many_processes():
    """512 prompts of 5 completions, 128 an update: 640 completions an update, 4 updates a rollout."""
    given = {**SIZES, MICRO: 4, "trainer.max_steps": 10, "trainer.save_freq": 5, f"{OPTIM}.lr_warmup_steps": 3}
    for processes, accumulation, generation in ((1, 160, 640), (8, 20, 80)):
        options = options_of(given, processes)
        assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] * processes == 640
        assert (options["gradient_accumulation_steps"], options["steps_per_generation"]) == (accumulation, generation)
        assert (options["max_steps"], options["save_steps"], options["warmup_steps"]) == (40, 20, 12)
        assert (options["logging_steps"], options["num_generations"]) == (4, 5)
    with pytest.raises(ConfigError, match="An update takes 640 completions .* 3 processes with 4 at a time"):
        convert({**ENOUGH, **given}, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"worker.rollout.name": "vllm"},
            {"learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup", "epsilon": 0.2, "epsilon_high": 0.3,
             "delta": 3.0, "kl_coef": 1e-3, "kl_penalty": "kl", "use_kl_loss": False, "system_prompt_file": "none",
             "choices_key": "none", "output_dir": "checkpoints/easy_r1/demo", "num_train_epochs": 15,
             "vllm_importance_sampling_correction": False, "eval_strategy": "no"}),
        ({f"{ACTOR}.loss_type": "gspo"}, {"loss_type": "dapo", "importance_sampling_level": "sequence"}),
        ({f"{ACTOR}.loss_type": "cispo", f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_high": 4},
         {"loss_type": "cispo", "epsilon_high": 5}),
        ({"algorithm.kl_coef": "1e-2", "algorithm.kl_type": "adaptive"}, {"kl_coef": "1e-2", "kl_target": 0.1}),
        ({"algorithm.online_filtering": True, "algorithm.filter_key": "accuracy"},
            {"reward_funcs": ["./math.py:compute_score", "./math.py:compute_score[accuracy]"],
             "reward_weights": [1.0, 0.0], "filter_key": "accuracy", "dynamic_sampling_max_rounds": 19}),
        ({"algorithm.use_advantage_shaping": True}, {"enable_trajectory_reweighting": False}),
        ({f"{LORA}.rank": 64}, {"lora_r": 64, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}),
        ({f"{OPTIM}.lr_scheduler_type": "cosine", f"{OPTIM}.min_lr_ratio": 0.1},
         {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
        ({**SIZES, "data.val_files": "some/questions@test", "trainer.val_freq": 5,
          "worker.rollout.val_override_config": {"temperature": 0, "n": 4, "do_sample": False}},
         {"eval_strategy": "steps", "eval_steps": 20, "eval_on_start": True, "num_generations_eval": 4,
          "eval_temperature": 0}),
        (  # two updates a rollout; theirs lets the policy wait while the step is below critic_warmup: twice for 3
            {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95, "trainer.critic_warmup": 3,
             "worker.critic.optim.lr": 1e-5, "worker.critic.optim.lr_warmup_steps": 5},
            {"advantage_estimator": "gae", "lam": 0.95, "critic": "model", "critic_warmup": 4,
             "critic_learning_rate": 1e-5, "critic_warmup_steps": 10, "cliprange_value": 0.5},
        ),
    ],
)  # fmt: skip
def test_options_by_hand(given, expected):
    options = options_of(given)
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "key", "value", "why"),
    [
        ("refused", "worker.actor.loss_type", "dppo", "supported values are default, gspo"),
        ("refused", "algorithm.adv_estimator", "reinforce_plus_plus", "EasyR1's version has no baseline"),
        ("refused", "worker.actor.optim.strategy", "adamw_bf16", "the rounding of bfloat16 weights"),
        ("unsupported", "worker.actor.clip_ratio_lwo", 0.2, "Did you mean worker.actor.clip_ratio_low"),
        ("unsupported", "worker.rollout.val_override_config", {"top_k": 5}, "top_k cannot be set for evaluation alone"),
    ],
)
def test_values_that_cannot_be_followed_are_named(kind, key, value, why):
    found = convert({**ENOUGH, key: value})
    assert list(getattr(found, kind)) == [key]
    assert why in getattr(found, kind)[key]
    assert any(line.key == key and line.value.startswith("stops") for line in found.table_rows)
    with pytest.raises(ConfigError, match=re.escape(why)):
        found.check(ignore_unknown=False, has_rewards=False)
    if kind == "unsupported":
        found.check(ignore_unknown=True, has_rewards=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.disable_kl", "flase", "is 'flase': give true or false"),
        ("algorithm.kl_coef", "much", "is 'much': give a number"),
        ("data.train_files", "hub/a,hub/b", "several sources are supported only if all are files"),
    ],
)
def test_values_of_another_type_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert({**ENOUGH, key: value})


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
        options = options_of({"data.train_files": train, "data.val_files": test})
        assert {name: options.get(name) for name in expected} == expected
        assert not absent & set(options)


def test_modules_left_out_of_an_adapter():
    given = {f"{LORA}.rank": 8, f"{LORA}.target_modules": "q_proj,v_proj", f"{LORA}.exclude_modules": ".*visual.*"}
    (pattern,) = options_of(given)["lora_target_modules"]
    names = ("model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.0.q_proj", "x.k_proj")
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, False, False]


MTRL = """
dataset: {train_files: hub/a, val_files: hub/a@test, max_response_length: 256, rollout_batch_size: 256}
training: {project_name: mtrl_training, experiment_name: vl}
optimization: {advantage_estimator: grpo, divergence_coef: 0.01, divergence_type: adaptive, divergence_target: 6.0}
worker:
  actor:
    model: {model_path: some/model, peft_type: lora, lora_rank: 8, lora_target_modules: [q_proj, v_proj]}
    optim: {lr: 1.0e-6, warmup_steps: 10}
    fsdp: {sharding_strategy: FULL_SHARD, mixed_precision_dtype: bf16}
    global_batch_size: 256
  rollout: {n: 8}
  reward: {reward_type: function, reward_fn_path: reward.py, num_cpus: 4}
"""


def test_mtrl():
    """One update a rollout; the divergence in the rewards, as use_divergence_loss is off by default."""
    found = convert(flatten(yaml.safe_load(MTRL)))
    assert (found.unsupported, found.refused) == ({}, {})
    expected = {
        "kl_coef": 0.01, "kl_type": "adaptive", "kl_target": 6.0, "use_kl_loss": False, "warmup_steps": 10,
        "reward_funcs": ["reward.py:reward_function"], "reward_num_cpus": 4, "lora_r": 8,
        "lora_target_modules": ["q_proj", "v_proj"], "bf16": True, "output_dir": "checkpoints/mtrl_training/vl",
    }  # fmt: skip
    assert {name: found.options[name] for name in expected} == expected
    with pytest.raises(ConfigError, match="divergence_coef is 0.01, but its other name algorithm.kl_coef is 0.1"):
        convert({"optimization.divergence_coef": 0.01, "algorithm.kl_coef": 0.1})
    assert is_convertible(yaml.safe_load(MTRL))
    assert not is_convertible({"learning_rate": 1e-5, "model_init_kwargs": {"a": 1}})


def test_a_default_that_nobody_wrote_stops_nothing(monkeypatch):
    """Theirs: 256 prompts an update for a critic, 4 completions a pass, vLLM on 2 GPUs, and wandb."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = {"worker.actor.global_batch_size": 2, "worker.actor.ppo_epochs": 2, "worker.rollout.n": 3}
    options = options_of({**given, "algorithm.adv_estimator": "gae", f"{OPTIM}.weight_decay": 0.1})
    assert (options["per_device_train_batch_size"], options["gradient_accumulation_steps"]) == (3, 2)
    assert (options["use_vllm"], options["report_to"]) == (False, ["none"])
    stated = {"worker.rollout.name": "vllm", "trainer.logger": ["wandb"], "worker.actor.global_batch_size": 64}
    options = options_of(stated, 4)
    assert (options["use_vllm"], options["report_to"], options["vllm_tensor_parallel_size"]) == (True, ["wandb"], 2)


def test_token_weights_of_a_port():
    """The names inside EasyR1 and the options here are the same table; also under worker.rollout and worker.actor."""
    for name, option in OPTION_ALIASES.items():
        assert EASYR1_KEYS[f"algorithm.{name}"].option == option
    given = {
        "algorithm.enable_token_weights": True, "algorithm.token_weight_clip": [0.5, 2.0],
        "worker.rollout.token_weight_smooth_sigma": 1.0, "worker.actor.token_weight_last_k_layers": 4,
        "worker.rollout.collect_attentions": True,
    }  # fmt: skip
    expected = {"token_weights": True, "token_weights_clip": [0.5, 2.0], "token_weights_smooth_sigma": 1.0,
                "token_weights_last_k_layers": 4}  # fmt: skip
    for engine, source in (("hf", "generate"), ("vllm", "scoring")):
        options = options_of({**given, "worker.rollout.name": engine})
        assert {name: options[name] for name in expected} == expected
        assert options["attention_source"] == source


def test_the_newest_checkpoint_of_a_folder_is_continued(tmp_path):
    """Complete ones alone; an empty folder begins, and so does one that is not there, if it is asked for."""
    load, find = "trainer.load_checkpoint_path", "trainer.find_last_checkpoint"
    folder = tmp_path / "experiment"

    def resumed(**given):
        found = convert({**ENOUGH, load: str(folder), "trainer.val_only": False, **given})
        assert found.evaluation_options()["model_name_or_path"] == (found.checkpoint or "some/model")
        assert bool(found.notes) == (found.checkpoint is None)
        return found.options.get("resume_from_checkpoint")

    assert resumed() == str(folder)  # which is refused where it is read
    assert resumed(**{find: True}) == "none"
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "run.json").touch()
    assert resumed(**{find: True}) == "none"
    assert resumed(**{find: True, "trainer.save_checkpoint_path": str(folder)}) == "latest"
    for name in ("checkpoint-9", "checkpoint-10"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").touch()
    assert resumed() == resumed(**{find: True}) == str(folder / "checkpoint-10")
    assert resumed(**{find: False}) == str(folder)
    (tmp_path / "theirs" / "actor").mkdir(parents=True)
    assert resumed(**{load: str(tmp_path / "theirs")}) == str(tmp_path / "theirs")


def test_references_are_resolved_after_overrides(tmp_path, monkeypatch):
    pytest.importorskip("omegaconf")
    file = tmp_path / "config.yaml"
    sizes = "worker: {actor: {global_batch_size: 8}}\ndata: {rollout_batch_size: '${worker.actor.global_batch_size}'}"
    file.write_text(sizes)
    argv = ["--config", str(file), "worker.actor.global_batch_size=4", "trainer.experiment_name=x_${oc.env:RUN}"]
    monkeypatch.setenv("RUN", "7")
    found, _ = read_configuration(argv)
    assert found == {
        "worker.actor.global_batch_size": 4, "data.rollout_batch_size": 4, "trainer.experiment_name": "x_7"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be resolved: Interpolation key 'data.nothing' not found"):
        read_configuration([*argv, "data.seed=${data.nothing}"])


def test_verl_names_with_verl_defaults():
    given = {
        "data.train_files": "hub/a", "actor_rollout_ref.model.path": "some/model", "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 512,
        "actor_rollout_ref.rollout.val_kwargs": {"do_sample": False},
    }  # fmt: skip
    found = convert(given)
    assert found.refused == {}
    assert list(found.unsupported) == ["worker.reward.reward_function"]
    expected = {"kl_coef": 1e-3, "kl_penalty": "low_var_kl", "use_kl_loss": True, "epsilon_high": 0.2,
                "num_train_epochs": 30, "num_generations": 5, "loss_type": "dapo"}  # fmt: skip
    assert {name: found.options[name] for name in expected} == expected
    assert convert({**given, "actor_rollout_ref.actor.use_kl_loss": False}).options["kl_coef"] == 0.0
    assert convert({**given, "algorithm.adv_estimator": "gae"}).options["critic_learning_rate"] == 1e-5
    assert (
        "actor_rollout_ref.actor.megatron.x" in convert({**given, "actor_rollout_ref.actor.megatron.x": 1}).unsupported
    )
