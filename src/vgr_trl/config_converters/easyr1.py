"""Compute options from EasyR1's keys. A step of EasyR1 is a rollout; a step here is an optimizer update."""

import json
import os
import re
from collections.abc import Callable
from importlib import util
from math import gcd
from pathlib import Path
from typing import Any

from vgr_trl.config_converters.conversion import Conversion
from vgr_trl.errors import ConfigError

_ROLLOUT_SIZE_KEY, _UPDATE_SIZE_KEY = "data.rollout_batch_size", "worker.actor.global_batch_size"
_MICRO_BATCH_SIZE_KEY = "worker.actor.micro_batch_size_per_device_for_update"
_DTYPES = {None: "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CONDITIONS: dict[str | None, Callable[[Conversion], bool]] = {
    None: lambda c: True,
    "lora": lambda c: c["worker.actor.model.lora.rank"] > 0,
    "warmup by ratio": lambda c: c["worker.actor.optim.lr_warmup_steps"] in (None, -1),
    "gae": lambda c: c["algorithm.adv_estimator"] == "gae",
    "sapo": lambda c: c["worker.actor.loss_type"] == "sapo",
    "clipping": lambda c: c["worker.actor.loss_type"] not in ("sapo", "cispo"),
    "kl": lambda c: not c["algorithm.disable_kl"],
    "adaptive kl": lambda c: c.options.get("kl_type") == "adaptive",
    "filtering": lambda c: bool(c["algorithm.online_filtering"]),
}
_LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def count_updates(c: Conversion) -> int:
    """Return the optimizer steps per rollout: EasyR1 counts rollouts as steps.

    Raises:
        ConfigError: updates do not divide a rollout.
    """
    rollout, update = c.read_integer(_ROLLOUT_SIZE_KEY), c.read_integer(_UPDATE_SIZE_KEY)
    if rollout % update:
        sizes = [f"{c.name(key)} {c.describe(key)}" for key in (_ROLLOUT_SIZE_KEY, _UPDATE_SIZE_KEY)]
        raise ConfigError(f"{', but '.join(sizes)}: give a multiple of the second.")
    return rollout // update * c.read_integer("worker.actor.ppo_epochs")


def convert_model(c: Conversion) -> None:
    """Convert checkpoint, dtypes and adapter."""
    key, kept, computed = "worker.actor.model", "worker.actor.fsdp.torch_dtype", "worker.actor.fsdp.mp_param_dtype"
    path = c[f"{key}.model_path"]
    if path is None:
        c.mark_refused(f"{key}.model_path", "give a checkpoint folder or a hub name")
    c.set("model_name_or_path", path, f"{key}.model_path")
    if c[f"{key}.tokenizer_path"] not in (None, path):
        c.mark_unsupported(f"{key}.tokenizer_path", "the processor saved with the model is used")
    c.set("dtype", _DTYPES[c.read_choice(kept, *_DTYPES)], kept)
    kind = c.read_choice(computed, "bf16", "fp16", "fp32")
    c.set("bf16", kind == "bf16", computed)
    c.set("fp16", kind == "fp16", computed)
    _convert_adapter(c, key, f"{key}.lora")


def _convert_adapter(c: Conversion, key: str, lora: str) -> None:
    kind = c.read_choice(f"{key}.peft_type", None, "lora", "qlora")
    rank, excluded = c.read_integer(f"{lora}.rank", 0), c[f"{lora}.exclude_modules"]
    frozen = f"{key}.freeze_vision_tower"
    if kind is not None and rank == 0:
        name = c.names.get(f"{lora}.rank", f"{key}.lora_rank")
        raise ConfigError(f"{c.name(f'{key}.peft_type')} is {kind}, but the rank is 0: give {name}=64, for example.")
    if c[frozen] and not (rank and excluded):
        c.mark_unsupported(frozen, "give lora.exclude_modules: the vision tower is frozen only if adapters exclude it")
    if rank == 0:
        return
    targets = _split_names(c[f"{lora}.target_modules"])
    if excluded:  # a PEFT pattern, since TRL has no option to exclude modules
        names = "|".join(map(re.escape, _LINEAR_MODULES if targets == ["all-linear"] else targets))
        targets = [rf"(?!(?:{excluded})$)(?:.*\.)?(?:{names})"]
    c.set("use_peft", True, f"{lora}.rank")
    c.set("load_in_4bit", kind == "qlora", f"{key}.peft_type")
    c.set("lora_target_modules", targets, f"{lora}.target_modules", *[f"{lora}.exclude_modules"] * bool(excluded))


def _split_names(value: Any) -> list[str]:
    texts = [value or ""] if isinstance(value, str | None) else list(value)
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def convert_data(c: Conversion) -> None:
    """Convert data sources (files, a folder or a hub name, each with `@split`), columns and prompt template."""
    train_key, test_key = "data.train_files", "data.val_files"
    (train, split), (test, test_split) = (_parse_source(c[key], c.name(key)) for key in (train_key, test_key))
    if train is None:
        c.mark_refused(train_key, "give files, a folder or a hub name, also with @split")
        return
    c.files |= {key: names for key, names in ((train_key, train), (test_key, test)) if isinstance(names, list)}
    if isinstance(train, list):
        files = f"train={'+'.join(train)}"
        if isinstance(test, list):
            files, test, test_split = f"{files},test={'+'.join(test)}", train, "test"
        c.set("data_files", files, train_key)
    else:
        c.set("dataset_path" if Path(train).is_dir() else "dataset_name", train, train_key)
    c.set("dataset_train_split", split, train_key)
    if test is not None:
        c.set("dataset_test_split", test_split, test_key)
        if test != train:
            c.set("test_dataset", test[0] if isinstance(test, list) else test, test_key)
            if isinstance(test, list) and len(test) > 1:
                c.mark_refused(test_key, "several evaluation files need training files, not a folder or hub name")
    c.set("choices_key", "none")
    for part in ("image", "video"):
        key = f"data.{part}_key"
        c.set(f"{part}_key", None if c[key] in (f"{part}s", part) else c[key] or "none", key)
    template = c["data.format_prompt"]
    option = "system_prompt_file" if template is None else "question_template_file"
    c.set(option, template or "none", "data.format_prompt")
    c.files["data.format_prompt"] = [template] if template else []


def _parse_source(value: Any, key: str) -> tuple[Any, str]:
    """Return a list of files, a folder or a hub name (None if not given), and the split."""
    pairs = [(name, split or "train") for name, _, split in (part.partition("@") for part in _split_names(value))]
    suffixes = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
    if pairs and all(Path(name).is_file() or Path(name).suffix in suffixes for name, _ in pairs):
        return [name for name, _ in pairs], "train"
    if len(pairs) > 1:
        raise ConfigError(f"{key} is {value!r}: several sources are supported only if all are files.")
    return pairs[0] if pairs else (None, "")


def convert_reward(c: Conversion) -> None:
    """Convert the reward function; a filter key other than the overall score becomes a reward of weight 0."""
    key, filter_key = "worker.reward.reward_function", "algorithm.filter_key"
    type_key = "worker.reward.reward_type"
    if c[type_key] == "model":
        c.mark_unsupported(type_key, "give the model by --reward_model_name_or_path")
        return
    kind = c.read_choice(type_key, None, "function", "batch", "sequential")
    if c[key] is None:
        c.mark_unsupported(key, "give --reward_funcs, such as FILE.py:FUNCTION")
        return
    file, colon, name = str(c[key]).rpartition(":")
    c.files[key] = [file if colon else name] if ".py" in str(c[key]) else []
    spec = f"{file}:{name}" if colon else f"{name}:{_default_function(name, kind)}"
    if c["algorithm.online_filtering"] and c[filter_key] != "overall":
        c.set("reward_funcs", [spec, f"{spec}[{c[filter_key]}]"], key, filter_key)
        c.set("reward_weights", [1.0, 0.0], filter_key)
    else:
        c.set("reward_funcs", [spec], key)
    c.set("reward_type", None if kind == "function" else kind, type_key)
    if arguments := c["worker.reward.reward_function_kwargs"]:
        c.set("reward_function_kwargs", json.dumps(arguments), "worker.reward.reward_function_kwargs")


def _default_function(file: str, kind: str | None) -> str:
    """Return the function of a reward file that is named without one: `main`, or `reward_function` if it is alone."""
    text = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else ""
    is_alone = re.findall(r"^def (\w+)", text, re.MULTILINE) == ["reward_function"]
    return "reward_function" if kind == "function" or is_alone else "main"


def convert_batches(c: Conversion) -> None:
    """Convert batch sizes so that micro-batch, update and rollout have as many completions as in EasyR1."""
    n, micro = c.read_integer("worker.rollout.n"), c.read_integer(_MICRO_BATCH_SIZE_KEY)
    if n < 2:
        c.mark_refused("worker.rollout.n", "TRL compares the completions of a prompt: give at least 2, for example 8")
        return
    rollout, update = c.read_integer(_ROLLOUT_SIZE_KEY) * n, c.read_integer(_UPDATE_SIZE_KEY) * n
    while _MICRO_BATCH_SIZE_KEY not in c.stated and micro > 1 and update % (micro * c.processes):
        micro -= 1
    at_once = micro * c.processes
    if update % at_once:
        takes = f"An update takes {update} completions ({c.name(_UPDATE_SIZE_KEY)} · {c.name('worker.rollout.n')})"
        passes = f"{c.processes} processes with {micro} at a time ({c.name(_MICRO_BATCH_SIZE_KEY)})"
        raise ConfigError(f"{takes}, which {passes} cannot share evenly: change one of the three.")
    c.set("num_generations", n, "worker.rollout.n")
    c.set("per_device_train_batch_size", micro, _MICRO_BATCH_SIZE_KEY)
    c.set("gradient_accumulation_steps", update // at_once, _UPDATE_SIZE_KEY)
    c.set("steps_per_generation", rollout // at_once, _ROLLOUT_SIZE_KEY)
    dynamic, budget = "worker.actor.dynamic_batching", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    if c.framework == "verl" and c[dynamic]:
        c.set("max_tokens_per_micro_batch", c.read_integer(budget), budget, dynamic)


def convert_schedule(c: Conversion) -> None:
    """Convert lengths and intervals to optimizer steps."""
    steps, warmup = "trainer.max_steps", "worker.actor.optim.lr_warmup_steps"
    if c[steps] is not None:
        c.set("max_steps", c.read_integer(steps) * count_updates(c), steps)
    else:
        c.set("num_train_epochs", c.read_integer("trainer.total_epochs"), "trainer.total_epochs")
    c.set("logging_steps", count_updates(c))
    save, limit = c["trainer.save_freq"], c["trainer.save_limit"]
    c.set("save_strategy", "steps" if save > 0 else "no", "trainer.save_freq")
    c.set("save_steps", save * count_updates(c) if save > 0 else None, "trainer.save_freq")
    c.set("save_total_limit", limit if limit is not None and limit > 0 else None, "trainer.save_limit")
    if c[warmup] not in (None, -1):
        c.set("warmup_steps", c.read_integer(warmup, 0) * count_updates(c), warmup)


def convert_evaluation(c: Conversion) -> None:
    """Convert the evaluation schedule and its sampling; both libraries also evaluate at the end."""
    key, sampling, first = "trainer.val_freq", "worker.rollout.val_override_config", "trainer.val_before_train"
    values = {"n": 1, "do_sample": True, "temperature": None, "top_p": None, **(c[sampling] or {})}
    n, samples, temperature, top_p = (values.pop(name) for name in ("n", "do_sample", "temperature", "top_p"))
    if samples is False:
        temperature = 0
    if any(value != -1 for value in values.values()):
        c.mark_unsupported(sampling, f"{', '.join(values)} cannot be set for evaluation alone")
    if not c["data.val_files"] or not (c[key] > 0 or c[first]):
        c.set("eval_strategy", "no", key)
        return
    c.set("eval_strategy", "steps", key)
    c.set("eval_steps", c[key] * count_updates(c) if c[key] > 0 else 10**9, key)  # or never
    c.set("eval_on_start", bool(c[first]), first)
    c.set("num_generations_eval", n, sampling)
    c.set("per_device_eval_batch_size", n * max(1, c.read_integer(_MICRO_BATCH_SIZE_KEY) // n))
    c.set("eval_temperature", temperature, sampling)
    c.set("eval_top_p", None if temperature == 0 else top_p, sampling)


def convert_optimizer(c: Conversion) -> None:
    """Convert AdamW's betas and the learning-rate schedule."""
    key = "worker.actor.optim"
    first, second = c[f"{key}.betas"]
    c.set("adam_beta1", float(first), f"{key}.betas")
    c.set("adam_beta2", float(second), f"{key}.betas")
    c.read_choice(f"{key}.strategy", "adamw")
    kind = c.read_choice(f"{key}.lr_scheduler_type", "constant", "constant_with_warmup", "cosine")
    least = c[f"{key}.min_lr_ratio"] if kind == "cosine" else None
    name = "constant_with_warmup" if kind != "cosine" else "cosine_with_min_lr" if least else "cosine"
    c.set("lr_scheduler_type", name, f"{key}.lr_scheduler_type")
    c.set("lr_scheduler_kwargs", {"min_lr_rate": float(least)} if least else None, f"{key}.min_lr_ratio")


def convert_rollout(c: Conversion) -> None:
    """Convert generation: colocated vLLM without importance-sampling correction, or transformers.

    vLLM does not return attention, so the scoring pass measures it.
    """
    key, parallel = "worker.rollout.name", "worker.rollout.tensor_parallel_size"
    engine = c.read_choice(key, "vllm", "hf")
    if key not in c.stated and util.find_spec("vllm") is None:
        engine = "hf"
    c.set("use_vllm", engine == "vllm", key)
    if engine == "vllm":
        c.set("vllm_mode", "colocate", key)
        c.set("vllm_enable_sleep_mode", True)
        c.set("vllm_importance_sampling_correction", False)
        size = c.read_integer(parallel)
        c.set("vllm_tensor_parallel_size", size if parallel in c.stated else gcd(size, c.processes), parallel)
    c.set("top_k", max(0, c["worker.rollout.top_k"]), "worker.rollout.top_k")
    collects = "worker.rollout.collect_attentions"
    c.set("attention_source", "generate" if c[collects] and engine == "hf" else "scoring", collects)


def convert_advantages(c: Conversion) -> None:
    """Convert the advantage estimator and trajectory reweighting."""
    key = "algorithm.adv_estimator"
    c.set("advantage_estimator", c.read_choice(key, "grpo", "rloo", "remax", "grpo_passk", "gae"), key)
    reweighted, filtered = "algorithm.enable_trajectory_reweighting", "algorithm.enable_perception_filtering"
    c.set("enable_trajectory_reweighting", bool(c[reweighted] and c[filtered]), reweighted, filtered)
    c.set("perturb_per", "completion" if c[filtered] else None, filtered)


def convert_critic(c: Conversion) -> None:
    """Convert the critic, a copy of the policy with a value head; only used with GAE."""
    waits, key, policy = "trainer.critic_warmup", "worker.critic", "worker.actor"
    if c["algorithm.adv_estimator"] != "gae":
        if c.read_integer(waits, 0) > 1:
            c.mark_refused(waits, "EasyR1 delays the policy by that many steps even without a critic")
        return
    c.set("critic", "model", f"{key}.model.model_path")
    steps = c[f"{key}.optim.lr_warmup_steps"]
    steps = 0 if steps in (None, -1) else steps
    c.set("critic_warmup_steps", steps * count_updates(c), f"{key}.optim.lr_warmup_steps")
    if steps == 0 and c[f"{key}.optim.lr_warmup_ratio"]:
        c.mark_refused(f"{key}.optim.lr_warmup_ratio", "give lr_warmup_steps, which becomes critic_warmup_steps")
    c.set("critic_warmup", max(0, c.read_integer(waits, 0) - 1) * count_updates(c), waits)
    if c[f"{key}.model.model_path"] not in (None, c[f"{policy}.model.model_path"]):
        c.mark_refused(f"{key}.model.model_path", "the critic starts as a copy of the policy")
    same = ("global_batch_size", "ppo_epochs", "max_grad_norm", "loss_avg_mode", "optim.weight_decay", "optim.betas")
    for name in same:
        if f"{key}.{name}" in c.stated and c[f"{key}.{name}"] != (of_policy := c[f"{policy}.{name}"]):
            c.mark_refused(f"{key}.{name}", f"the critic uses the policy's settings: give {of_policy}, or leave it out")


def convert_loss(c: Conversion) -> None:
    """Convert the loss and its aggregation to TRL's names."""
    key = "worker.actor"
    kind = c.read_choice(f"{key}.loss_type", "default", "gspo", "gspo_token", "cispo", "sapo")
    mode = c.read_choice(f"{key}.loss_avg_mode", "token", "seq")
    if kind in ("sapo", "cispo"):
        c.set("loss_type", kind, f"{key}.loss_type")
        if (mode, kind) not in (("seq", "sapo"), ("token", "cispo")):
            why = "TRL's sapo averages over completions, give seq; its cispo over tokens, give token"
            c.mark_refused(f"{key}.loss_avg_mode", why)
    else:
        c.set("loss_type", "dapo" if mode == "token" else "grpo", f"{key}.loss_type", f"{key}.loss_avg_mode")
        c.set("importance_sampling_level", None if kind == "default" else "sequence", f"{key}.loss_type")
    if kind == "cispo":
        c.set("epsilon_high", 1 + float(c[f"{key}.clip_ratio_high"]), f"{key}.clip_ratio_high")
        if c[f"{key}.clip_ratio_low"] is not None:
            c.mark_refused(f"{key}.clip_ratio_low", "TRL clips the ratio of cispo from above alone: give null")


def convert_kl(c: Conversion) -> None:
    """Convert the KL divergence from the reference model."""
    if c["algorithm.disable_kl"]:
        c.set("kl_coef", 0.0, "algorithm.disable_kl")
        return
    kind = c.read_choice("algorithm.kl_penalty", "kl", "abs", "mse", "low_var_kl")
    c.set("kl_penalty", kind, "algorithm.kl_penalty")
    controller = c.read_choice("algorithm.kl_type", "fixed", "adaptive")
    c.set("kl_type", "fixed" if c["algorithm.use_kl_loss"] else controller, "algorithm.kl_type")


def convert_filtering(c: Conversion) -> None:
    """Convert online filtering, which replaces groups outside the bounds by other prompts."""
    tries = c["trainer.max_try_make_batch"]
    if c["algorithm.online_filtering"]:
        c.set("dynamic_sampling", "resample", "algorithm.online_filtering")
        c.set("dynamic_sampling_max_rounds", tries - 1 if tries > 1 else 1000, "trainer.max_try_make_batch")


def convert_output(c: Conversion) -> None:
    """Convert output folder, resuming and trackers."""
    key = "trainer.save_checkpoint_path"
    folder = c[key] or os.path.join("checkpoints", c["trainer.project_name"], c["trainer.experiment_name"])
    c.set("output_dir", folder, key)
    _convert_resume(c, folder)
    accepted = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
    logger = c["trainer.logger"]
    names = [logger] if isinstance(logger, str) else list(logger)
    if unknown := [name for name in names if name not in (*accepted, "console", "file")]:
        c.mark_unsupported("trainer.logger", f"{', '.join(unknown)} is not supported, only {', '.join(accepted)}")
    trackers = [name for name in names if name in accepted]
    if "trainer.logger" not in c.stated:  # only installed ones; a folder ./wandb has a spec but no origin
        trackers = [name for name in trackers if (spec := util.find_spec(name)) and spec.origin]
    c.set("report_to", trackers or ["none"], "trainer.logger")


def _convert_resume(c: Conversion, folder: str) -> None:
    """Resume from the given checkpoint.

    With `find_last_checkpoint`, resume from the newest complete checkpoint in its folder or in the output.
    """
    load, find = "trainer.load_checkpoint_path", "trainer.find_last_checkpoint"
    source, is_sought = c[load], bool(c[find])
    complete = [file.parent for file in Path(source or folder).glob("checkpoint-[0-9]*/manifest.json")]
    if is_sought and complete:
        c.checkpoint = str(max(complete, key=lambda path: (len(path.name), path.name)))
    if source is None:
        if is_sought and any(Path(folder).glob("checkpoint-*")):
            c.set("resume_from_checkpoint", "latest", find)
        return
    present = {path.name for path in Path(source).glob("*")}
    is_new = not present or ("run.json" in present and "trainer_state.json" not in present)
    if is_sought and is_new and not c.checkpoint and (find in c.stated or Path(source).is_dir()):
        is_output = Path(source) == Path(folder)
        c.set("resume_from_checkpoint", "latest" if is_output else "none", load)
        c.notes += [] if is_output else [f"{c.name(load)} {source} has no checkpoint: this run starts anew."]
        return
    c.checkpoint = c.checkpoint or str(source)
    c.set("resume_from_checkpoint", c.checkpoint, load)


CONVERTERS = (
    convert_model, convert_data, convert_reward, convert_batches, convert_schedule, convert_evaluation,
    convert_optimizer, convert_rollout, convert_advantages, convert_critic, convert_loss, convert_kl,
    convert_filtering, convert_output,
)  # fmt: skip
