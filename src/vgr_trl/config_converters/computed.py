"""Options that several keys of EasyR1 make together, and the translation of a whole file."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import util
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from vgr_trl.config_converters.easyr1 import TABLE, THEIRS, VERL, VERL_KEYS, WHOLE, Key, is_verl, of_mtrl, of_verl
from vgr_trl.utils import ConfigError

# ---------------------------------------------------------------------------------------------------------------------
# What a rule is given.


Set = Callable[..., None]  # (option, value, *keys)


@dataclass
class Values:
    """The values of all keys of EasyR1, stated or default.

    Args:
        by_key: the values.
        processes: of this run.
        stated: the keys that the configuration states; the defaults of others are theirs.
        stopped: reasons by key why a value has no meaning here; rules add to them.
        refused: likewise, of values without which something else would be trained.
    """

    by_key: Mapping[str, Any]
    processes: int
    stated: Collection[str] = ()
    stopped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.by_key[key]

    def stop(self, key: str, why: str) -> None:
        """Note that the value of a key has no meaning here."""
        self.stopped[key] = why

    def refuse(self, key: str, why: str) -> None:
        """Note that the value of a key cannot be followed, and that without it something else would be trained."""
        self.refused[key] = why

    def whole(self, key: str, least: int = 1) -> int:
        """Return a whole number, or raise `ConfigError`."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{key} is {value!r}: give a whole number of at least {least}.")
        return value

    def one_of(self, key: str, *known: Any) -> Any:
        """Return a value that is one of those known, else note why not and return the first."""
        if self[key] in known:
            return self[key]
        self.refuse(key, f"here it can be {', '.join(map(str, known))}")
        return known[0]

    @property
    def updates(self) -> int:
        """Updates of the policy, our steps, per rollout, their step."""
        keys = "data.rollout_batch_size", "worker.actor.global_batch_size"
        rollout, update = map(self.whole, keys)
        if rollout % update:
            missing = next((key for key in keys if key not in self.stated), None)
            raise ConfigError(
                f"{keys[0]} is {rollout} and {keys[1]} {update}, but a rollout is a multiple of the prompts of an "
                f"update: {f'add {missing}, whose default this is' if missing else 'change one of the two'}."
            )
        return rollout // update * self.whole("worker.actor.ppo_epochs")


# ---------------------------------------------------------------------------------------------------------------------
# Batches, and everything that is counted in steps: theirs are rollouts, ours updates.


_NEVER = 10**9
_ROLLOUT, _UPDATE = "data.rollout_batch_size", "worker.actor.global_batch_size"
_MICRO = "worker.actor.micro_batch_size_per_device_for_update"


def batches(values: Values, set_: Set) -> None:
    """The same completions in a micro-batch, an update and a rollout, on however many processes."""
    n, micro = values.whole("worker.rollout.n"), values.whole(_MICRO)
    if n < 2:
        why = "TRL takes at least 2 completions of a prompt, with a critic too: give worker.rollout.n=8, for example"
        values.refuse("worker.rollout.n", why)
    rollout, update = values.whole(_ROLLOUT) * n, values.whole(_UPDATE) * n
    while _MICRO not in values.stated and micro > 1 and update % (micro * values.processes):
        micro -= 1
    at_once = micro * values.processes
    if update % at_once:
        raise ConfigError(
            f"An update takes {update} completions ({_UPDATE} · worker.rollout.n), which {values.processes} processes "
            f"with {micro} at a time ({_MICRO}) cannot share evenly: change one of the three."
        )
    set_("num_generations", n, "worker.rollout.n")
    set_("per_device_train_batch_size", micro, _MICRO)
    set_("gradient_accumulation_steps", update // at_once, _UPDATE)
    set_("steps_per_generation", rollout // at_once, _ROLLOUT)


def schedule(values: Values, set_: Set) -> None:
    """Lengths and intervals in our steps."""
    updates = values.updates
    if values["trainer.max_steps"] is not None:
        set_("max_steps", values.whole("trainer.max_steps") * updates, "trainer.max_steps")
    else:
        set_("num_train_epochs", values.whole("trainer.total_epochs"), "trainer.total_epochs")
    set_("logging_steps", updates)
    save = values["trainer.save_freq"]
    set_("save_strategy", "steps" if save > 0 else "no", "trainer.save_freq")
    if save > 0:
        set_("save_steps", save * updates, "trainer.save_freq")
    limit = values["trainer.save_limit"]
    if limit is not None and limit > 0:
        set_("save_total_limit", limit, "trainer.save_limit")
    if values["worker.actor.optim.lr_warmup_steps"] not in (None, -1):
        warmup = values.whole("worker.actor.optim.lr_warmup_steps", 0)
        set_("warmup_steps", warmup * updates, "worker.actor.optim.lr_warmup_steps")
    else:
        set_("warmup_ratio", float(values["worker.actor.optim.lr_warmup_ratio"]), "worker.actor.optim.lr_warmup_ratio")


def evaluations(values: Values, set_: Set) -> None:
    """When is evaluated, and how completions are sampled then; theirs also does it at the end, as ours."""
    key, sampling = "trainer.val_freq", "worker.rollout.val_override_config"
    given = dict(values[sampling] or {})
    n = given.pop("n", 1)
    if given.pop("do_sample", True) is False:
        given["temperature"] = 0
    temperature, top_p = given.pop("temperature", None), given.pop("top_p", None)
    if given and any(value != -1 for value in given.values()):
        values.stop(sampling, f"evaluations have no {', '.join(given)} of their own")
    has_data = bool(values["data.val_files"])
    if not has_data or not (values[key] > 0 or values["trainer.val_before_train"]):
        set_("eval_strategy", "no", key)
        return
    set_("eval_strategy", "steps", key)
    set_("eval_steps", values[key] * values.updates if values[key] > 0 else _NEVER, key)
    set_("eval_on_start", bool(values["trainer.val_before_train"]), "trainer.val_before_train")
    set_("num_generations_eval", n, sampling)
    set_("per_device_eval_batch_size", n * max(1, values.whole(_MICRO) // n))
    if temperature is not None:
        set_("eval_temperature", temperature, sampling)
    if top_p is not None and temperature != 0:
        set_("eval_top_p", top_p, sampling)


# ---------------------------------------------------------------------------------------------------------------------
# Questions: where they are, and what the user says.


_TRAIN, _TEST = "data.train_files", "data.val_files"


def data(values: Values, set_: Set) -> None:
    """Files, folders and names on the hub, each with its split behind `@`; the columns as named, nothing else."""
    train, split = _source(values[_TRAIN], _TRAIN)
    if train is None:
        raise ConfigError(f"{_TRAIN} is missing: give files, a folder or a name on the hub, with @ and the split.")
    test, test_split = _source(values[_TEST], _TEST)
    if isinstance(train, list):
        files = f"train={'+'.join(train)}"
        if isinstance(test, list):
            files, test, test_split = f"{files},test={'+'.join(test)}", train, "test"
        set_("data_files", files, _TRAIN)
        split = "train"
    else:
        set_("dataset_path" if Path(train).is_dir() else "dataset_name", train, _TRAIN)
    set_("dataset_train_split", split, _TRAIN)
    if test is not None:
        set_("dataset_test_split", test_split, _TEST)
        if test != train:
            set_("test_dataset", test[0] if isinstance(test, list) else test, _TEST)
            if isinstance(test, list) and len(test) > 1:
                values.refuse(_TEST, "several files to evaluate on go with files to train on alone")
    set_("choices_key", "none")
    for part in ("image", "video"):
        key = f"data.{part}_key"
        if values[key] not in (f"{part}s", part):
            set_(f"{part}_key", values[key] or "none", key)
    if values["data.format_prompt"] is None:
        set_("system_prompt_file", "none", "data.format_prompt")
    else:
        set_("question_template_file", values["data.format_prompt"], "data.format_prompt")


def _source(given: Any, key: str) -> tuple[Any, str]:
    """A list of files, or a folder or hub name, and the split; None where nothing is given."""
    parts = [part for text in (given if isinstance(given, list | tuple) else [given or ""]) for part in text.split(",")]
    parts = [part.strip() for part in parts if part.strip()]
    if not parts:
        return None, ""
    pairs = [(name, split or "train") for name, _, split in (part.partition("@") for part in parts)]
    looks_like_files = [Path(name).is_file() or Path(name).suffix in _SUFFIXES for name, _ in pairs]
    if all(looks_like_files):
        return [name for name, _ in pairs], "train"
    if len(pairs) > 1:
        raise ConfigError(f"{key} is {given!r}: several parts must all be files.")
    return pairs[0]


_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")


# ---------------------------------------------------------------------------------------------------------------------
# From rewards to the loss.


_ACTOR, _CRITIC = "worker.actor", "worker.critic"
_AS_THE_POLICY = (
    "global_batch_size", "ppo_epochs", "max_grad_norm", "loss_avg_mode", "optim.weight_decay", "optim.betas",
)  # fmt: skip
_ESTIMATORS = ("grpo", "rloo", "remax", "grpo_passk", "gae")


def advantages(values: Values, set_: Set) -> None:
    """How completions are compared."""
    key = "algorithm.adv_estimator"
    kind = values[key]
    if kind == "reinforce_plus_plus":
        values.refuse(key, "theirs has no baseline, ours of that name has the mean of the group: use rloo or grpo")
    elif kind not in _ESTIMATORS:
        values.refuse(key, f"here it can be {', '.join(_ESTIMATORS)}")
    else:
        set_("advantage_estimator", kind, key)
    reweighted, filtered = "algorithm.enable_trajectory_reweighting", "algorithm.enable_perception_filtering"
    set_("enable_trajectory_reweighting", bool(values[reweighted] and values[filtered]), reweighted, filtered)


def critic(values: Values, set_: Set) -> None:
    """A model of its own with a head, trained beside the policy; only with GAE, as theirs."""
    waits = "trainer.critic_warmup"
    if values["algorithm.adv_estimator"] != "gae":
        if values.whole(waits, 0) > 1:
            values.refuse(waits, "there the policy waits that many steps, though there is no critic")
        return
    for name in ("gamma", "lam"):
        set_(name, float(values[f"algorithm.{name}"]), f"algorithm.{name}")
    set_("critic", "model", f"{_CRITIC}.model.model_path")
    set_("critic_learning_rate", float(values[f"{_CRITIC}.optim.lr"]), f"{_CRITIC}.optim.lr")
    set_("cliprange_value", float(values[f"{_CRITIC}.cliprange_value"]), f"{_CRITIC}.cliprange_value")
    steps = values[f"{_CRITIC}.optim.lr_warmup_steps"]
    steps = 0 if steps in (None, -1) else steps
    set_("critic_warmup_steps", steps * values.updates, f"{_CRITIC}.optim.lr_warmup_steps")
    if steps == 0 and values[f"{_CRITIC}.optim.lr_warmup_ratio"]:
        values.refuse(f"{_CRITIC}.optim.lr_warmup_ratio", "give lr_warmup_steps, which critic_warmup_steps are")
    set_("critic_warmup", max(0, values.whole(waits, 0) - 1) * values.updates, waits)
    if values[f"{_CRITIC}.model.model_path"] not in (None, values["worker.actor.model.model_path"]):
        values.refuse(f"{_CRITIC}.model.model_path", "the critic starts as a copy of the policy")
    for name in _AS_THE_POLICY:
        key, policys = f"{_CRITIC}.{name}", values[f"{_ACTOR}.{name}"]
        if key in values.stated and values[key] != policys:
            values.refuse(key, f"the critic is trained as the policy: give {policys}, or leave it out")


def losses(values: Values, set_: Set) -> None:
    """The clipped loss and its relatives, by TRL's names."""
    kind = values.one_of(f"{_ACTOR}.loss_type", "default", "gspo", "gspo_token", "cispo", "sapo")
    mode = values.one_of(f"{_ACTOR}.loss_avg_mode", "token", "seq")
    low, high = values[f"{_ACTOR}.clip_ratio_low"], float(values[f"{_ACTOR}.clip_ratio_high"])
    if kind == "sapo":
        _sapo(values, set_, mode)
        return
    if kind == "cispo":
        set_("loss_type", "cispo", f"{_ACTOR}.loss_type")
        set_("epsilon_high", 1 + high, f"{_ACTOR}.clip_ratio_high")
        if low is not None:
            why = "theirs bounds the ratio of cispo from below too, TRL from above alone: give null for that"
            values.refuse(f"{_ACTOR}.clip_ratio_low", why)
        if mode != "token":
            values.refuse(f"{_ACTOR}.loss_avg_mode", "TRL's cispo is a mean over tokens: give token")
        return
    set_("epsilon", float(low), f"{_ACTOR}.clip_ratio_low")
    set_("loss_type", {"token": "dapo", "seq": "grpo"}[mode], f"{_ACTOR}.loss_type", f"{_ACTOR}.loss_avg_mode")
    if kind != "default":
        set_("importance_sampling_level", "sequence", f"{_ACTOR}.loss_type")
    set_("epsilon_high", high, f"{_ACTOR}.clip_ratio_high")
    set_("delta", float(values[f"{_ACTOR}.clip_ratio_dual"]), f"{_ACTOR}.clip_ratio_dual")


def _sapo(values: Values, set_: Set, mode: str) -> None:
    set_("loss_type", "sapo", f"{_ACTOR}.loss_type")
    set_("sapo_temperature_pos", float(values[f"{_ACTOR}.tau_positive"]), f"{_ACTOR}.tau_positive")
    set_("sapo_temperature_neg", float(values[f"{_ACTOR}.tau_negative"]), f"{_ACTOR}.tau_negative")
    if mode != "seq":
        values.refuse(f"{_ACTOR}.loss_avg_mode", "TRL's sapo is a mean over completions: give seq")


def divergence(values: Values, set_: Set) -> None:
    """The KL from the reference."""
    keys = {name: f"algorithm.{name}" for name in ("kl_coef", "kl_penalty", "use_kl_loss", "kl_type")}
    if values["algorithm.disable_kl"]:
        set_("kl_coef", 0.0, "algorithm.disable_kl")
        return
    in_loss = bool(values[keys["use_kl_loss"]])
    set_("kl_coef", float(values[keys["kl_coef"]]), keys["kl_coef"])
    set_("use_kl_loss", in_loss, keys["use_kl_loss"])
    set_("kl_penalty", values.one_of(keys["kl_penalty"], "kl", "abs", "mse", "low_var_kl"), keys["kl_penalty"])
    kind = values.one_of(keys["kl_type"], "fixed", "adaptive")
    set_("kl_type", "fixed" if in_loss else kind, keys["kl_type"])
    if in_loss or kind == "fixed":
        return
    set_("kl_target", float(values["algorithm.kl_target"]), "algorithm.kl_target")
    set_("kl_horizon", float(values["algorithm.kl_horizon"]), "algorithm.kl_horizon")


def filtering(values: Values, set_: Set) -> None:
    """Groups outside the bounds are left out, and further prompts drawn in their place."""
    key = "algorithm.online_filtering"
    set_("online_filtering", bool(values[key]), key)
    if not values[key]:
        return
    set_("filter_key", values["algorithm.filter_key"], "algorithm.filter_key")
    set_("filter_low", float(values["algorithm.filter_low"]), "algorithm.filter_low")
    set_("filter_high", float(values["algorithm.filter_high"]), "algorithm.filter_high")
    set_("dynamic_sampling", "resample", key)
    tries = values["trainer.max_try_make_batch"]
    set_("dynamic_sampling_max_rounds", tries - 1 if tries > 1 else 1000, "trainer.max_try_make_batch")


# ---------------------------------------------------------------------------------------------------------------------
# The model, its optimizer, and the engine that generates.


_MODEL, _LORA = "worker.actor.model", "worker.actor.model.lora"
_TYPES = {None: "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(values: Values, set_: Set) -> None:
    """The checkpoint, the types that it is held and computed in, and its adapter."""
    path = values[f"{_MODEL}.model_path"]
    if path is None:
        raise ConfigError(f"{_MODEL}.model_path is missing: give a checkpoint folder or a hub name.")
    set_("model_name_or_path", path, f"{_MODEL}.model_path")
    if values[f"{_MODEL}.tokenizer_path"] not in (None, path):
        values.stop(f"{_MODEL}.tokenizer_path", "the processor is the one saved with the model")
    held, computed = "worker.actor.fsdp.torch_dtype", "worker.actor.fsdp.mp_param_dtype"
    set_("dtype", _TYPES[values.one_of(held, *_TYPES)], held)
    kind = values.one_of(computed, "bf16", "fp16", "fp32")
    set_("bf16", kind == "bf16", computed)
    set_("fp16", kind == "fp16", computed)
    _adapter(values, set_)


def _adapter(values: Values, set_: Set) -> None:
    kind = values.one_of(f"{_MODEL}.peft_type", None, "lora", "qlora")
    rank, excluded = values.whole(f"{_LORA}.rank", 0), values[f"{_LORA}.exclude_modules"]
    frozen = f"{_MODEL}.freeze_vision_tower"
    if kind is not None and rank == 0:
        raise ConfigError(f"{_MODEL}.peft_type is {kind}, but no rank is given: give {_MODEL}.lora_rank.")
    if rank == 0:
        if values[frozen]:
            values.stop(frozen, "only adapters leave the tower as it is")
        return
    if values[frozen] and not excluded:
        values.stop(frozen, "give lora.exclude_modules, which leaves the tower without adapters")
    set_("use_peft", True, f"{_LORA}.rank")
    set_("load_in_4bit", kind == "qlora", f"{_MODEL}.peft_type")
    set_("lora_r", rank, f"{_LORA}.rank")
    set_("lora_alpha", values[f"{_LORA}.alpha"], f"{_LORA}.alpha")
    set_("lora_dropout", float(values[f"{_LORA}.dropout"]), f"{_LORA}.dropout")
    targets = _names(values[f"{_LORA}.target_modules"])
    if excluded:  # one pattern for PEFT, which is told of exclusions by no option
        names = "|".join(map(re.escape, _LINEAR if targets == ["all-linear"] else targets))
        targets = [rf"(?!(?:{excluded})$)(?:.*\.)?(?:{names})"]
        set_("lora_target_modules", targets, f"{_LORA}.target_modules", f"{_LORA}.exclude_modules")
    else:
        set_("lora_target_modules", targets, f"{_LORA}.target_modules")


def _names(targets: Any) -> list[str]:
    texts = [targets] if isinstance(targets, str) else list(targets)
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def optimizer(values: Values, set_: Set) -> None:
    """AdamW's betas and the schedule of the learning rate."""
    first, second = values["worker.actor.optim.betas"]
    set_("adam_beta1", float(first), "worker.actor.optim.betas")
    set_("adam_beta2", float(second), "worker.actor.optim.betas")
    if values["worker.actor.optim.strategy"] != "adamw":
        why = "theirs makes up for the rounding of bfloat16 weights: give adamw, with fsdp.torch_dtype null for float32"
        values.refuse("worker.actor.optim.strategy", why)
    key, least = "worker.actor.optim.lr_scheduler_type", values["worker.actor.optim.min_lr_ratio"]
    kind = values.one_of(key, "constant", "constant_with_warmup", "cosine")
    if kind != "cosine":
        set_("lr_scheduler_type", "constant_with_warmup", key)
    elif not least:
        set_("lr_scheduler_type", "cosine", key)
    else:
        set_("lr_scheduler_type", "cosine_with_min_lr", key)
        set_("lr_scheduler_kwargs", {"min_lr_rate": float(least)}, "worker.actor.optim.min_lr_ratio")


def rollout(values: Values, set_: Set) -> None:
    """Generation by vLLM beside the training, as theirs; no ratio of its probabilities to the policy's is taken."""
    key, parallel = "worker.rollout.name", "worker.rollout.tensor_parallel_size"
    engine = values.one_of(key, "vllm", "hf")
    if key not in values.stated and util.find_spec("vllm") is None:
        engine = "hf"
    set_("use_vllm", engine == "vllm", key)
    if engine == "vllm":
        set_("vllm_mode", "colocate", key)
        set_("vllm_enable_sleep_mode", True)
        set_("vllm_importance_sampling_correction", False)
        size = values.whole(parallel)
        set_("vllm_tensor_parallel_size", size if parallel in values.stated else gcd(size, values.processes), parallel)
    set_("top_k", max(0, values["worker.rollout.top_k"]), "worker.rollout.top_k")


# ---------------------------------------------------------------------------------------------------------------------
# Rewards, folders, trackers.


_FUNCTION = "worker.reward.reward_function"
_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
_OF_MTRL = "reward_function"


def reward(values: Values, set_: Set) -> None:
    """The function of the file, and the score that groups are filtered by as a reward of weight 0."""
    given = values[_FUNCTION]
    kind = values.one_of("worker.reward.reward_type", None, "function", "batch", "sequential")
    if given is None:
        values.stop(_FUNCTION, "give FILE.py:FUNCTION, or --reward_funcs")
        return
    file, colon, name = str(given).rpartition(":")
    if not colon:
        file, name = str(given), _OF_MTRL if kind == "function" else "main"
    spec = f"{file}:{name}"
    key = values["algorithm.filter_key"]
    if values["algorithm.online_filtering"] and key != "overall":
        set_("reward_funcs", [spec, f"{spec}[{key}]"], _FUNCTION, "algorithm.filter_key")
        set_("reward_weights", [1.0, 0.0], "algorithm.filter_key")
    else:
        set_("reward_funcs", [spec], _FUNCTION)
    if kind in ("batch", "sequential"):
        set_("reward_type", kind, "worker.reward.reward_type")
    if arguments := values["worker.reward.reward_function_kwargs"]:
        set_("reward_function_kwargs", json.dumps(arguments), "worker.reward.reward_function_kwargs")


def run(values: Values, set_: Set) -> None:
    """Where the run is saved and continued, and who hears of it."""
    key, project = "trainer.save_checkpoint_path", values["trainer.project_name"]
    folder = values[key] or os.path.join("checkpoints", project, values["trainer.experiment_name"])
    set_("output_dir", folder, key)
    if values["trainer.load_checkpoint_path"] is not None:
        set_("resume_from_checkpoint", values["trainer.load_checkpoint_path"], "trainer.load_checkpoint_path")
    elif values["trainer.find_last_checkpoint"] and any(Path(folder).glob("checkpoint-*")):
        set_("resume_from_checkpoint", "latest", "trainer.find_last_checkpoint")
    set_("project", project, "trainer.project_name")
    logger = values["trainer.logger"]
    names = [logger] if isinstance(logger, str) else list(logger)
    if unknown := [name for name in names if name not in (*_TRACKERS, "console", "file")]:
        values.stop("trainer.logger", f"there is no {', '.join(unknown)} here, but {', '.join(_TRACKERS)}")
    trackers = [name for name in names if name in _TRACKERS]
    if "trainer.logger" not in values.stated:  # a folder ./wandb has a spec too, but no origin
        trackers = [name for name in trackers if getattr(util.find_spec(name), "origin", None)]
    set_("report_to", trackers or ["none"], "trainer.logger")


RULES = (
    model, data, reward, batches, schedule, evaluations, optimizer, rollout, advantages, critic, losses, divergence,
    filtering, run,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# A configuration of EasyR1, MTRL, VPPO or verl as options of this library, key by key.


class Line(NamedTuple):
    """A line of the table: their key, our option (or why there is none), its value, whether it was stated."""

    key: str
    ours: str
    value: str
    is_stated: bool


@dataclass
class Translation:
    """What a configuration becomes.

    Attributes:
        options: by name.
        lines: of the table, in the order of theirs.
        stopped: keys that are unknown, or that have no meaning here, and why.
        refused: keys without which something else would be trained, and why.
        values: of all keys of EasyR1.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    stopped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def is_theirs(content: Any) -> bool:
    """Whether the content of a YAML file has sections of these trainers."""
    return isinstance(content, dict) and any(isinstance(content.get(name), dict) for name in THEIRS)


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and of_mtrl(key) not in WHOLE and key not in _WHOLE_OF_VERL:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


_WHOLE_OF_VERL = [key for key, (_, default) in VERL.items() if isinstance(default, dict)]


def translate(given: Mapping[str, Any], processes: int = 1) -> Translation:
    """Return what the stated keys, and the defaults of the others, become.

    Args:
        given: values by dotted key, as the file and the overrides state them.
        processes: of this run.

    Raises:
        ConfigError: a value cannot be right in theirs either, or two names of a key have different values.
    """
    taken, names = _in_easyr1(given)
    stated = {key for key in TABLE if names.get(key, key) in given}
    found = Translation(values={key: known.default for key, known in TABLE.items()})
    for key, value in taken.items():
        if key in TABLE:
            _check_kind(names.get(key, key), value, TABLE[key])
            found.values[key] = value
        elif (known := VERL_KEYS.get(key)) is None:
            found.stopped[names.get(key, key)] = f"is unknown.{_nearest(key)}"
        elif known.fits is not None and value not in known.fits:
            found.stopped[key] = f"is {value!r}: {known.why}"
    values, made = Values(found.values, processes, stated), _Made(found.options)
    for rule in RULES:
        try:
            rule(values, made.set)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"A value of the configuration is of another kind than theirs, where {rule.__name__} is read ({error})."
            ) from error
    for key, known in TABLE.items():
        value = found.values[key]
        if known.ours is not None and value is not None:
            made.set(known.ours, value, key)
        elif known.fits is not None and not any(value == fit for fit in known.fits):
            values.stop(key, known.why)
    for told, reasons in ((found.stopped, values.stopped), (found.refused, values.refused)):
        told |= {
            names.get(key, key): f"is {found.values[key]!r}{'' if key in stated else ' by default'}: {why}"
            for key, why in reasons.items()
        }
    found.lines = list(_lines(found, made, stated, names))
    return found


def _check_kind(name: str, value: Any, known: Key) -> None:
    """Refuse what is no switch or no number where theirs has one: a text such as "flase" would switch it on."""
    if value is None or not (known.is_read or known.ours is not None):
        return
    if isinstance(known.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give true or false.")
    if isinstance(known.default, int | float) and not isinstance(known.default, bool) and not _is_number(value):
        raise ConfigError(f"{name} is {value!r}: give a number.")


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


class _Made:
    """The options that are made, and of which keys."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.of: dict[str, list[str]] = {}

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Note an option."""
        self.options[option] = value
        for key in keys or ("",):
            self.of.setdefault(key, []).append(option)


def _in_easyr1(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    if is_verl(dict(given)):
        found, names = of_verl(dict(given))
        return {**found, **{key: value for key, value in given.items() if key in VERL_KEYS}}, names
    stated: dict[str, Any] = {}
    names = {}
    for name, value in given.items():
        key = of_mtrl(name)
        if key in stated and stated[key] != value:
            raise ConfigError(f"{names[key]} is {stated[key]!r} and {name}, which means the same, {value!r}: give one.")
        stated[key], names[key] = value, name
    return stated, names


def _lines(found: Translation, made: _Made, stated: Collection[str], names: Mapping[str, str]) -> Iterable[Line]:
    reasons = {**found.stopped, **found.refused}
    for key, known in TABLE.items():
        shown, is_stated = names.get(key, key), key in stated
        if shown in reasons:
            yield Line(shown, "—", f"stops: {reasons[shown].split(': ', 1)[-1]}", is_stated)
            continue
        for option in made.of.get(key, ()):
            yield Line(shown, option, str(found.options[option]), is_stated)
        if key not in made.of and is_stated:
            yield Line(shown, "—", known.why or "has no part in this configuration", is_stated)
    shown_before = {names.get(key, key) for key in TABLE}
    yield from (Line(key, "—", f"stops: {why}", True) for key, why in found.stopped.items() if key not in shown_before)
    for option in made.of.get("", ()):
        yield Line("(none)", option, str(found.options[option]), False)


def _nearest(key: str) -> str:
    nearest = get_close_matches(key, TABLE, n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]}?" if nearest else ""
