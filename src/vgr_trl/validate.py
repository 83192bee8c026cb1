"""What is checked, made and planned before the first generation: options, rewards, data, and what passes leave out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, Features, IterableDataset, Value
from packaging.version import Version
from peft import PeftConfig, PeftModel
from transformers import AutoProcessor, GenerationConfig, PreTrainedModel
from transformers.integrations import get_available_reporting_integrations as trackers
from transformers.utils import is_torchvision_available, logging
from trl.trainer import utils

from vgr_trl.config import SWITCHES
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import COLUMNS as BOX_COLUMNS
from vgr_trl.data.images import IMAGE_COLUMNS, PLACE, box_problem
from vgr_trl.data.lengths import SIZES, PromptLengths, sizes_of
from vgr_trl.data.prompts import special_problem, special_tokens
from vgr_trl.data.read_row import image_columns, undecoded
from vgr_trl.data.rows import (
    REASON,
    Sieve,
    SkippedRow,
    drop_long_prompts,
    map_rows,
    prepare_rows,
    shown_by,
    skipped_rows,
)
from vgr_trl.efficiency.vision_cache import VisionCache, parts_of_tower, tower_trains, why_not_once
from vgr_trl.forward_passes import DummyImage
from vgr_trl.loss import coefficient_warning, kl_penalty_reward
from vgr_trl.measure import named_datasets
from vgr_trl.options import unused_options
from vgr_trl.patches.distributed import close_group_at_exit, give_timeout
from vgr_trl.patches.transformers import without_cudnn_attention
from vgr_trl.patches.trl import suppress_image_tokens
from vgr_trl.registries import BLIND_ANSWERS, find_measurements, needed_signals
from vgr_trl.rewards.attention import scale_by_accuracy
from vgr_trl.rewards.groups import gather_groups, needed_columns
from vgr_trl.rewards.loading import (
    RewardSchedule,
    check_callable,
    is_reward_name,
    load_reward,
    reads_solution,
    replace_by_hard_negative,
)
from vgr_trl.sampling.zero_variance import filter_index
from vgr_trl.sharing.model_support import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    has_active_dropout,
    is_compiled,
    recomputes_without_graph,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_forward import why_not_pack
from vgr_trl.sharing.probe import why_not_share, why_padding_counts
from vgr_trl.utils import (
    ConfigError,
    DataError,
    Feature,
    UnsupportedTRLError,
    describe_features,
    naming_torchvision,
    release,
)

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)


def checked_config(args: DAPOConfig | None, model: str | PreTrainedModel, options: Mapping[str, Any]) -> DAPOConfig:
    """Return the options of a trainer; raise `ConfigError` if they do not fit its other named arguments.

    TRL loads the model before the processor, so a processor that lacks torchvision is refused here.
    """
    if isinstance(model, str) and options.get("processing_class") is None and not is_torchvision_available():
        with naming_torchvision(model), suppress(OSError, ValueError):
            AutoProcessor.from_pretrained(model, trust_remote_code=getattr(args, "trust_remote_code", False))
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return DAPOConfig(f"{name.rstrip('/').split('/')[-1]}-DAPO")
    if not isinstance(args, DAPOConfig):
        raise ConfigError(f"args is a {type(args).__name__}: give a DAPOConfig, which takes the same options.")
    if missing := {"mlflow", "swanlab", "tensorboard", "trackio", "wandb"} & {*(args.report_to or ())} - {*trackers()}:
        raise ConfigError(f"report_to names {min(missing)}, which is missing or off: pip install it, or give none.")
    if args.max_prompt_length is not None and options.get("environment_factory") is not None:
        raise ConfigError(
            "max_prompt_length needs prompts from the data, but environment_factory makes them: drop one."
        )
    return args


def plan_rewards(
    reward_funcs: Any, args: DAPOConfig, num_generations: Callable[[], int]
) -> tuple[list[Any], RewardSchedule]:
    """Return the rewards as TRL gets them, and the schedule of their weights.

    Rewards that compare the completions of a prompt see whole groups.

    Args:
        reward_funcs: None, one or several; some may be names.
        num_generations: returns the completions per prompt, at each call.
    """
    several = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    sizes: Any = {"max_completion_length": args.max_completion_length, "soft_punish_cache": args.soft_punish_cache}
    rewards = [load_reward(each, **sizes) if is_reward_name(each) else each for each in several if each is not None]
    if args.vgr_hard_negative:
        rewards = replace_by_hard_negative(rewards)
    if args.attention_reward_scale == "accuracy":
        rewards = scale_by_accuracy(rewards)
    schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
    state = PartialState()
    over_groups = [
        gather_groups(reward, gather_object, state.process_index, num_generations)
        if needed_columns(reward) is not None
        else reward
        for reward in rewards
    ]
    return over_groups + [kl_penalty_reward] * args.penalises_kl, schedule


_OF_ONE_PROCESS = {  # options that may differ between the processes of a run
    "local_rank", "output_dir", "logging_dir", "run_name", "rollout_log_path", "eval_log_path", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "dataloader_num_workers", "dataloader_prefetch_factor",
    "dataloader_pin_memory", "hub_token", "resume_from_checkpoint",
}  # fmt: skip


def refuse_differing_options(args: DAPOConfig) -> None:
    """Raise `ConfigError` on all processes if their options differ, which would train something else in silence."""
    plain = (str, int, float, list, dict, type(None))
    given = {name: repr(value) for name, value in vars(args).items() if isinstance(value, plain) and name[0] != "_"}
    of_all = gather_object([{name: value for name, value in given.items() if name not in _OF_ONE_PROCESS}])
    for name in of_all[0]:
        for number, each in enumerate(of_all):
            if each.get(name) != of_all[0][name]:
                raise ConfigError(
                    f"{name} is {of_all[0][name]} in process 0 and {each.get(name)} in process {number}: give all "
                    "processes the same options."
                )


# The data


def make_ready(trainer: "DAPOTrainer", peft_config: PeftConfig | None) -> None:
    """Check what TRL has constructed, and make prompts of its data.

    Raises:
        UnsupportedTRLError: TRL cannot score on its device.
        ConfigError: options differ between the processes, the adapter names modules that the model lacks, or the data
            have images that it cannot read.
        DataError: the data are not understood, or no row can be used.
    """
    close_group_at_exit()
    refuse_differing_options(trainer.args)
    give_timeout(trainer.args.ddp_timeout)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    notice = None if trainer.args.cudnn_attention else without_cudnn_attention()
    if notice and trainer.accelerator.is_main_process:
        logger.warning(notice)
    if peft_config is not None:
        refuse_targets_without_module(trainer.accelerator.unwrap_model(trainer.model))
    make_data_ready(trainer)
    for name, dataset in named_datasets(trainer):
        if not trainer._is_vlm and (columns := image_columns(dataset)):
            raise ConfigError(
                f"The {name} data has a column `{columns[0]}`, but {type(trainer.model).__name__} with "
                f"{type(trainer.processing_class).__name__} reads text only: use a vision-language model with its "
                "processor, or remove the column."
            )


def make_data_ready(trainer: "DAPOTrainer") -> None:
    """Make prompts of rows that are questions; leave out rows that cannot be used, with a warning.

    Raises:
        DataError: the columns are not understood, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # which make the prompts
    special = special_tokens(trainer.processing_class)
    needs_solution = any(map(reads_solution, trainer.reward_funcs))
    boxes = reads_boxes(trainer.args, trainer.reward_funcs)

    def ready(dataset: Any, split: str, part: str | None) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        split = split if part is None else f"{split} {part}"
        if not _has_prompts(dataset):
            names = ", ".join(_names(dataset))
            dataset, skipped = prepare_rows(
                dataset, split=split, needs_solution=needs_solution, special=special, boxes=boxes
            )
            _warn(
                f"The {split} data are questions ({names}); prompts were made of them with the standard system prompt. "
                "vgr_trl.data.rows.prepare_rows does so with options of your own."
            )
            _warn_left_out(split, skipped)
            return dataset
        if isinstance(dataset, Dataset):
            return _without_bad_rows(dataset, split, special, boxes)
        if boxes:
            sieve = Sieve(split, lambda row: box_problem(row, sizes_of(row)))
            dataset = dataset.filter(sieve.keeps, with_indices=True)
            sieve.require_row(dataset)
        return dataset

    change_data(trainer, ready)


def change_data(trainer: "DAPOTrainer", change: Callable[[Any, str, str | None], Any]) -> None:
    """Replace the data of `trainer`, called `train`, and `eval` with the name of a part if it has several."""

    def changed(dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({name: change(part, split, name) for name, part in dataset.items()})
        return None if dataset is None else change(dataset, split, None)

    trainer.train_dataset = changed(trainer.train_dataset, "train")
    trainer.eval_dataset = changed(trainer.eval_dataset, "eval")


def reads_boxes(args: DAPOConfig, rewards: Iterable[Any]) -> bool:
    """Return whether a signal, a rule of credit or one of the rewards reads the boxes of rows."""
    needs = {need for reward in rewards for need in needed_signals(reward)} - {BLIND_ANSWERS}
    return "regions" in {*args.readers(), *find_measurements(needs)}


def _has_prompts(dataset: Any) -> bool:
    """Whether the rows have prompts that TRL can read: with images, these must be conversations."""
    if "prompt" not in _names(dataset):
        return False
    first: dict[str, Any] = next(iter(dataset), {})
    return not (image_columns(dataset) and isinstance(first.get("prompt"), str))


def _names(dataset: Any) -> list[str]:
    return list(next(iter(dataset), {}) if dataset.column_names is None else dataset.column_names)


def _without_bad_rows(dataset: Dataset, split: str, special: re.Pattern[str] | None, boxes: bool) -> Dataset:
    """The rows, with prompts, whose conversations hold no special token, and whose boxes can be read.

    A text is a prompt in its final form, and may hold special tokens.
    """
    if (shown := shown_by(dataset)) and shown.rules.special == special and shown.rules.boxes >= boxes:
        return dataset  # `prepare_rows` has checked it
    names = set(dataset.column_names or ())
    boxes = boxes and bool(names & set(BOX_COLUMNS))
    read = names & {"prompt", PLACE, *((*BOX_COLUMNS, *IMAGE_COLUMNS, SIZES) if boxes else ())}
    rows = undecoded(dataset.with_format(None).select_columns(sorted(read)))
    texts = len(rows) > 0 and not isinstance(rows[0]["prompt"], list)
    if len(rows) == 0 or (texts and not boxes):
        return dataset
    examine = partial(_problem, special=None if texts else special, boxes=boxes)
    found = map_rows(
        rows, examine, Features({REASON: Value("string")}), [special, boxes], f"Checking prompts ({split})"
    )
    reasons = list(found[REASON])
    skipped = skipped_rows(split, reasons, places=rows[PLACE] if PLACE in read else None)
    _warn_left_out(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _problem(row: Mapping[str, Any], special: re.Pattern[str] | None, boxes: bool) -> dict[str, str | None]:
    reason = None if special is None else special_problem(special, row["prompt"])
    return {REASON: box_problem(row, sizes_of(row)) if reason is None and boxes else reason}


def _warn_left_out(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped:
        first = skipped[0]
        _warn(f"Left out {len(skipped)} rows of the {split} data; the first: row {first.row}: {first.reason}.")


def _warn(sentence: str) -> None:
    if PartialState().is_main_process:
        logger.warning(sentence)


def check_data(trainer: "DAPOTrainer", measured_columns: Iterable[str]) -> None:
    """Refuse rewards and data that cannot be trained with; leave out prompts over `max_prompt_length`.

    Environments add columns of their own later.
    """
    args = trainer.args
    if trainer.environment_factories is None and trainer.rollout_func is None:
        for _, dataset in named_datasets(trainer):
            for reward in trainer.reward_funcs if getattr(dataset, "column_names", None) is not None else ():
                check_callable(reward, [*dataset.column_names, *measured_columns])
    if (limit := args.max_prompt_length) is not None:

        def count(split: str) -> None:
            trainer.step_metrics.prompts_too_long += split == "train"

        template: dict[str, Any] = {"tools": trainer.tools or None, "chat_template": trainer.chat_template}
        template |= cast("dict[str, Any]", trainer.chat_template_kwargs)
        lengths = PromptLengths(trainer.processing_class, **template)

        def kept(dataset: Any, split: str, part: str | None) -> Any:
            return drop_long_prompts(dataset, lengths, limit, part or split, partial(count, split))

        change_data(trainer, kept)
    prompts, train_dataset = args.prompts_per_rollout, trainer.train_dataset
    if hasattr(train_dataset, "__len__") and (rows := len(train_dataset)) < prompts:
        raise DataError(  # TRL drops what is left over of an epoch, which would be everything
            f"The train data has {rows} rows, but a rollout takes {prompts} prompts (generation_batch_size "
            f"{args.generation_batch_size} / num_generations {args.num_generations}): add rows, or lower "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )


# Options that do not fit the model, the data or the launch


def refuse_unfit_options(trainer: "DAPOTrainer", sharded: bool, has_images: bool) -> None:
    """Raise `ConfigError` for the first option that does not go with a trainer, a `filter_key` without reward too."""
    args, generations = trainer.args, int(trainer.num_generations)
    estimator, aggregation = args.advantage_estimator, args.multi_objective_aggregation
    makers = ("rollout_func", "tools", "environment_factories")
    maker = next((name.removesuffix("_factories") for name in makers if getattr(trainer, name, None)), None)
    of_transformers = {} if trainer.use_vllm else args.generation_kwargs or {}
    unknown = [name for name in of_transformers if not hasattr(GenerationConfig(), name)]
    # The losses of parts of a micro-batch add up to its loss; those of bnpo, if they are weighed by their tokens.
    parts = _why_rows_matter(trainer, "dapo" if trainer.loss_type == "bnpo" else trainer.loss_type)
    parts = "a critic learns from whole micro-batches" if args.uses_critic else parts
    noisy, corrects = args.noisy_generations, trainer.use_vllm and trainer.vllm_importance_sampling_correction
    shift = args.readers().get("shift", [""])[0]
    table: list[tuple[Any, str]] = [
        (estimator != "grpo" and aggregation != "sum_then_normalize",
         f"advantage_estimator is {estimator} with multi_objective_aggregation {aggregation}: the estimators take "
         "weighted sums, so use sum_then_normalize."),
        (args.selects_groups and aggregation != "sum_then_normalize",
         f"multi_objective_aggregation is {aggregation} with replay_buffer_size, dynamic_sampling or "
         "online_filtering, which find groups without a gradient by weighted sums: use sum_then_normalize, or drop "
         "them."),
        (estimator == "remax" and (trainer.use_vllm or trainer.use_transformers_continuous_batching),
         "advantage_estimator is remax, whose greedy completions are generated by transformers: switch off vLLM and "
         "continuous batching, or use rloo."),
        (unknown, f"generation_kwargs has {', '.join(unknown)}, which the generation of transformers does not know and "
         "leaves unread: give names of its GenerationConfig, or drop it."),
        (sharded and args.needs_full_kl,
         "kl_penalty is full with ZeRO-3 or FSDP, which do not gather the heads it runs again: use low_var_kl, or "
         "ZeRO-2."),
        (sharded and shift, f"{shift} compares whole distributions, which ZeRO-3 and FSDP do not gather the head for: "
         "use ZeRO-2, or a rule that reads the dependency."),
        (sharded and args.uses_critic and args.critic == "model",
         "critic is model with ZeRO-3 or FSDP, of whose parameters no process has a whole copy: use critic head, or "
         "ZeRO-2."),
        (maker and args.selects_groups, f"Groups cannot be replaced with {maker}: drop it, or replay_buffer_size, "
         "dynamic_sampling and online_filtering."),
        (maker and estimator == "remax", f"advantage_estimator is remax with {maker}, which would not generate "
         "greedily: drop it, or use rloo."),
        (args.max_tokens_per_micro_batch is not None and parts,
         f"max_tokens_per_micro_batch is {args.max_tokens_per_micro_batch}, but {parts}: switch one of the two off, or "
         "lower per_device_train_batch_size instead."),
        (noisy > generations,
         f"noisy_generations is {noisy} with num_generations {generations}: give at most that many."),
        *((noisy and wrong, f"noisy_generations cannot be used here: {why}") for wrong, why in (
            (not has_images, "the data have no images; add some, or switch it off."),
            (trainer.rollout_func or trainer.tools, "of rollout_func and tools; switch one of the two off."),
            (args.attention_source == "generate",
             'attention_source is "generate", which would measure noise; use "scoring".'),
            (trainer.use_transformers_continuous_batching, "continuous batching shows no images; switch it off."),
            (corrects, "vllm_importance_sampling_correction would weigh perturbed against clean images; set it to "
             "False."),
        )),
    ]  # fmt: skip
    for wrong, sentence in table:
        if wrong:
            raise ConfigError(sentence)
    if args.online_filtering:
        filter_index(args.filter_key, trainer.reward_func_names)


def refuse_targets_without_module(model: PeftModel) -> None:
    """Raise `ConfigError` if an adapter names a target that is no module of the model, which PEFT passes over."""
    targets = getattr(next(iter(model.peft_config.values())), "target_modules", None)
    if isinstance(targets, str) or not targets:
        return
    adapted = getattr(model.base_model, "targeted_module_names", [])
    missing = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in adapted))
    if missing:
        linear = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "in_features")}
        names = ", ".join(sorted(linear - {"base_layer", "default"}))
        raise ConfigError(
            f"No module of {type(model.get_base_model()).__name__} is named {' or '.join(missing)}, which the adapter "
            f"targets: give other names (linear modules are {names})."
        )


def check_head(device: torch.device, installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` where TRL's fused head cannot run: before 1.16 it is a Triton kernel and no more.

    Args:
        installed: version of TRL, that of the installed package by default.
    """
    kernel = getattr(utils, "_ChunkedLogProbFunction", None)
    of_trl = kernel is None or kernel.__module__.startswith("trl.")
    if release(installed) < Version("1.16") and of_trl and device.type not in ("cuda", "xpu"):
        raise UnsupportedTRLError(
            f"TRL {installed or version('trl')} scores by a Triton kernel, but the model is on {device.type}: train on "
            'a GPU, or pip install "trl>=1.16".'
        )


# What is computed once and what passes leave out, or why not


def _first(reasons: Mapping[str, Any]) -> str | None:
    """The first reason that holds; None if none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def plan_features(trainer: "DAPOTrainer") -> dict[str, Feature]:
    """Return what the `trainer` computes once and leaves out, or why not, by its options, its loss and its model."""
    args, model = trainer.args, trainer.model
    causal = causal_model(model)
    base = base_of(causal)
    off = {name: f"{name}=off" if getattr(args, name) == "off" else None for name in ("share_prompts", *SWITCHES)}
    neftune = "NEFTune's noise depends on the rows and columns of a pass" if args.neftune_noise_alpha else None
    columns = neftune or why_adapter_reads_whole_rows(model)
    compiles = "torch.compile" if _compiles(trainer) else None
    compiled = compiles or ("torch.compile" if is_compiled(model) else None)
    headless = "a model that is its own base" if base is causal else None
    router = "the load-balancing loss reads all tokens" if trainer.aux_loss_enabled else None
    option = what_reads_every_token(args)
    read = compiled or router or (option and f"{option} reads all tokens")
    unshared = off["share_prompts"] or columns
    training = unshared or compiles or _why_not_train(trainer) or why_not_share(model, gradients=True)
    alone = "training does not share prompts" if training else None
    rows = _why_rows_matter(trainer, trainer.loss_type)
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    spread = "a rollout is spread over several optimizer steps" if accumulated % generated else None
    cut = "optimizer steps begin within a rollout" if spread and generated % accumulated else None
    tokens, padding = off["skip_zero_advantage_tokens"], compiled or columns or why_padding_counts(base)
    generation = {
        "vLLM shares prompts itself": trainer.use_vllm,
        "continuous batching": trainer.use_transformers_continuous_batching,
        "FSDP": trainer.is_fsdp_enabled,
    }
    whole_completions = {
        "importance_sampling_level is sequence, a ratio of whole completions":
            trainer.importance_sampling_level == "sequence",
        "vespo weighs by the ratio of whole completions": trainer.loss_type == "vespo",
        "off_policy_mask_threshold compares whole completions": trainer.off_policy_mask_threshold is not None,
    }  # fmt: skip
    images = {
        "sharded parameters": is_sharded(trainer),
        "a model without a vision tower": not parts_of_tower(base),
        "the vision tower trains, and cannot be called alone": tower_trains(base) and trainer.dummy_image is None,
    }
    reasons = {
        "share_generation": unshared or _first(generation) or why_not_share(model, gradients=False),
        "share_scoring": unshared or compiles or why_not_share(model, gradients=False),
        "share_training": training,
        "regroup": alone or (None if args.share_prompts == "on" else rows or spread),
        "skip_zero_advantage": off["skip_zero_advantage"] or neftune or read,
        "skip_zero_advantage_tokens": tokens or read or headless or _first(whole_completions),
        "skip_padding": off["skip_padding"] or router or padding,
        "skip_head": tokens or compiled or headless,
        "skip_images": _first(images),
        "pack_completions": off["pack_completions"] or alone or why_not_pack(base)
            or ("FSDP" if trainer.is_fsdp_enabled else padding),
        "group_by_length": off["group_by_length"] or neftune or cut or rows,
        "reuse_first_pass": off["reuse_first_pass"] or _why_old_logps_are_scored(trainer, spread),
    }  # fmt: skip
    (reasons,) = broadcast_object_list([reasons])  # FSDP may have loaded the weights in the main process alone
    return {name: Feature(reason) for name, reason in reasons.items()}


def _why_not_train(trainer: "DAPOTrainer") -> str | None:
    """What only shows once the trainer has started: it wraps the model and switches checkpointing on later."""
    checkpointing, options = trainer.args.gradient_checkpointing, trainer.args.gradient_checkpointing_kwargs
    if checkpointing:
        reentrant = isinstance(options, dict) and options.get("use_reentrant", False)
    else:
        reentrant = recomputes_without_graph(trainer.model, when_training=True)
    first_fsdp = trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1
    reasons = {
        "gradient checkpointing with use_reentrant=True": reentrant,
        DROPS_CACHES: checkpointing and checkpoints_drop_caches(),
        "the load-balancing loss needs the router of every token": trainer.aux_loss_enabled,
        "the first version of FSDP": first_fsdp,
    }
    return _first(reasons)


def what_reads_every_token(args: DAPOConfig) -> str | None:
    """Return the option by which tokens that have no advantage are trained on too, a term of the loss or a critic."""
    return _first(
        {
            "beta": args.beta != 0,
            "entropy_coef": args.entropy_coef != 0,
            "use_adaptive_entropy": args.use_adaptive_entropy,
            "top_entropy_quantile": args.top_entropy_quantile < 1,
            "use_entropy_penalty": args.use_entropy_penalty,
            "perception_loss_weight": args.perception_loss_weight > 0,
            "der_loss_weight1": args.der_loss_weight1 > 0,
            "der_loss_weight2": args.der_loss_weight2 > 0,
            "kl_coef": args.has_kl_loss,
            "advantage_estimator": args.uses_critic,
        }
    )


# Losses that divide by something that does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
_REGROUPABLE_LOSSES = {"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"}


def _why_rows_matter(trainer: "DAPOTrainer", loss_type: str) -> str | None:
    """Why a loss depends on which rows share a micro-batch; None if it does not."""
    reasons = {
        f"the loss {loss_type} divides by the tokens of a micro-batch": loss_type not in _REGROUPABLE_LOSSES,
        "the entropy term is a mean over the tokens of a micro-batch": trainer._entropy_bonus_enabled,
        "top_entropy_quantile is taken over the tokens of a micro-batch": trainer.top_entropy_quantile < 1.0,
        "the load-balancing loss is taken over the tokens of a micro-batch": trainer.aux_loss_enabled,
    }
    return _first(reasons)


def _why_old_logps_are_scored(trainer: "DAPOTrainer", spread: str | None) -> str | None:
    """Why old log-probabilities cannot come from the first training pass; None if they can."""
    args, needed = trainer.args, trainer.measurement.needed
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return "the correction of vLLM's sampling compares with them"
    if args.gradient_accumulation_steps % ((args.steps_per_generation or 1) * args.num_iterations) == 0:
        return "the policy does not change between generation and loss: there are none"
    if spread or args.replay_buffer_size > 0:
        return spread or "replay_buffer_size keeps them"
    for need in ("entropies", "dependency", "logps", "shift", "values"):
        if need in needed:
            return f"{needed[need]} needs the pass anyway"
    random = args.neftune_noise_alpha or has_active_dropout(trainer.model, when_training=True)
    return "dropout, or the noise of NEFTune" if random else None


def plan_dummy_image(trainer: "DAPOTrainer", has_images: bool) -> DummyImage | None:
    """Return what takes part in the vision tower where no image of a process does; None: nothing need, or can."""
    base = base_of(causal_model(trainer.model))
    processor = getattr(trainer.processing_class, "image_processor", None)
    alone = trainer.accelerator.num_processes == 1 and not tower_trains(base)
    if alone or not (has_images and trainer._is_vlm) or processor is None or _compiles(trainer):
        return None
    if not hasattr(base, "get_image_features"):
        return None
    return DummyImage(processor, trainer.accelerator, is_sharded(trainer))


def plan_vision(trainer: "DAPOTrainer", has_images: bool) -> VisionCache:
    """Return the cache of the constructed `trainer`, off or on; `has_images`: whether its data have any."""
    base, megabytes = base_of(causal_model(trainer.model)), trainer.args.vision_cache_megabytes
    reasons = {
        "data without images": not has_images,
        "switched off": megabytes == 0,
        "torch.compile": _compiles(trainer) or is_compiled(trainer.model),
        "sharded parameters: every process has to call the vision tower equally often": is_sharded(trainer),
    }
    return VisionCache(base, megabytes, _first(reasons) or why_not_once(base))


def _compiles(trainer: "DAPOTrainer") -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def is_sharded(trainer: "DAPOTrainer") -> bool:
    """Whether a process has only parts of the parameters, under FSDP and ZeRO-3."""
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


def find_idle_options(trainer: "DAPOTrainer") -> dict[str, str]:
    """Return why each option of the trainer that is not at its default has no effect, by name."""
    needed = trainer.measurement.needed
    facts = {
        "attention": "attention" in needed,
        "similarity": "similarity" in needed,
        "blind_answers": "blind" in needed,
        "changing_weights": trainer.reward_schedule.changes,
        "evaluation": trainer.eval_dataset is not None,
        "length_reward": any("overlong" in name for name in trainer.reward_func_names),
    }
    return unused_options(trainer.args, [name for name, holds in facts.items() if not holds])


def describe_sharing(features: Mapping[str, Feature], num_generations: int) -> str:
    """Return a sentence on where prompts are computed once, and why not elsewhere."""
    stages: dict[str | None, list[str]] = {}
    for stage in ("generation", "scoring", "training"):
        stages.setdefault(features[f"share_{stage}"].reason, []).append(stage)
    where = [
        f"in {', '.join(names)}" if reason is None else f"not in {', '.join(names)} ({reason})"
        for reason, names in stages.items()
    ]
    return f"Each prompt is computed once for its {num_generations} completions: {'; '.join(where)}."


def announce(trainer: "DAPOTrainer") -> None:
    """Let the main process log where prompts are computed once, and which options are risky or idle."""
    if not trainer.accelerator.is_main_process:
        return
    args, features = trainer.args, trainer.features
    logger.warning(describe_sharing(features, trainer.num_generations))
    logger.info(describe_features(features))
    shared = features["share_generation"].enabled or features["share_training"].enabled
    if shared and has_active_dropout(trainer.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if trainer._is_vlm:
        logger.info(str(trainer.vision_cache))
    risk = coefficient_warning(args.perception_loss_weight, args.der_loss_weight1, args.der_loss_weight2)
    if risk is not None:
        logger.warning(risk)
    for name, why in trainer.idle_options.items():
        logger.warning(f"{name} is without effect because {why}.")
