"""What `DAPOTrainer` makes sure of before the first generation: rewards, columns, prompts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.columns import IMAGE_COLUMNS, PLACE, image_columns, images_of, undecoded
from vgr_trl.data.images import COLUMNS as BOX_COLUMNS
from vgr_trl.data.images import box_problem, fitted_by
from vgr_trl.data.prompts import refuse_named_files, special_problem, special_tokens
from vgr_trl.data.rows import Sieve, SkippedRow, drop_long_prompts, prepare_rows, scan, skipped_rows
from vgr_trl.efficiency.vision_cache import VisionCache
from vgr_trl.loss import coefficient_warning, kl_penalty_reward
from vgr_trl.measure import Measurement, named_datasets
from vgr_trl.options import unused_options
from vgr_trl.patches import close_group_at_exit, give_timeout, suppress_image_tokens
from vgr_trl.registries import BLIND_ANSWERS, measurements, needs_of
from vgr_trl.rewards.attention import scaled_by_accuracy
from vgr_trl.rewards.groups import gather_groups, needed_columns
from vgr_trl.rewards.loading import (
    RewardSchedule,
    check_callable,
    hardened,
    is_reward_name,
    load_reward,
    reads_solution,
)
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sharing.model_support import has_active_dropout
from vgr_trl.utils import ConfigError, DataError, Feature, describe_features
from vgr_trl.validate import check_head, refuse_targets_without_module

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)


def make_data_ready(trainer: ConstructedTrainer) -> None:
    """Make prompts of the rows of `trainer` that are questions still; what cannot be used is left out, with a warning.

    Raises:
        DataError: the columns are not understood, or no row can be used.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return  # prompts are made elsewhere
    special = special_tokens(trainer.processing_class)
    needs_solution = any(map(reads_solution, trainer.reward_funcs))
    boxes = reads_boxes(trainer.args, trainer.reward_funcs)

    def ready(dataset: Any, split: str, part: str | None) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        split = split if part is None else f"{split} {part}"
        if not _has_prompts(dataset):
            prepared, skipped = prepare_rows(
                dataset, split=split, needs_solution=needs_solution, special=special, boxes=boxes
            )
            _tell_made(split, dataset)
            _tell_left_out(split, skipped)
            return prepared
        if isinstance(dataset, IterableDataset):
            return _stream_without_bad_boxes(dataset, split) if boxes else dataset
        return _without_bad_rows(dataset, split, special, boxes)

    change_data(trainer, ready)


def change_data(trainer: ConstructedTrainer, change: Callable[[Any, str, str | None], Any]) -> None:
    """Replace the data of `trainer`, called `train`, and `eval` with the name of a part if it has several."""

    def changed(dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({name: change(part, split, name) for name, part in dataset.items()})
        return None if dataset is None else change(dataset, split, None)

    trainer.train_dataset = changed(trainer.train_dataset, "train")
    trainer.eval_dataset = changed(trainer.eval_dataset, "eval")


def reads_boxes(args: DAPOConfig, rewards: Iterable[Any]) -> bool:
    """Return whether a signal, a rule of credit or one of the rewards reads the boxes of rows."""
    needs = {need for reward in rewards for need in needs_of(reward)} - {BLIND_ANSWERS}
    return "regions" in {*args.readers(), *measurements(needs)}


def refuse_files_in_prompts(prompts: list[Any]) -> None:
    """Raise `DataError` if a conversation names files or addresses, which its processor would read or fetch."""
    for prompt in prompts:
        if isinstance(prompt, list):
            try:
                refuse_named_files(prompt)
            except DataError as error:
                raise DataError(f"A row of the data cannot be used: {error}.") from None


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
    names = set(dataset.column_names or ())
    boxes = boxes and bool(names & set(BOX_COLUMNS))
    read = names & {"prompt", PLACE, *(BOX_COLUMNS + IMAGE_COLUMNS if boxes else ())}
    rows = undecoded(dataset.with_format(None).select_columns(sorted(read)))
    texts = len(rows) > 0 and not isinstance(rows[0]["prompt"], list)
    if len(rows) == 0 or (texts and not boxes):
        return dataset
    fitted = fitted_by(dataset)

    def problem(row: Mapping[str, Any]) -> str | None:
        found = None if texts else special_problem(special, row["prompt"])
        return box_problem(row, fitted) if found is None and boxes else found

    reasons = scan(rows, problem, f"check prompts ({split})")
    skipped = skipped_rows(split, reasons, places=rows[PLACE] if PLACE in read else None)
    _tell_left_out(split, skipped)
    return dataset.select([row for row, reason in enumerate(reasons) if reason is None]) if skipped else dataset


def _stream_without_bad_boxes(dataset: IterableDataset, split: str) -> IterableDataset:
    sieve = Sieve(split, box_problem)
    kept = dataset.filter(sieve.keeps, with_indices=True)
    sieve.require_row(kept)
    return kept


def _tell_left_out(split: str, skipped: Sequence[SkippedRow]) -> None:
    if skipped and PartialState().is_main_process:
        logger.warning(
            f"Left out {len(skipped)} rows of the {split} data; the first: row {skipped[0].row}: {skipped[0].reason}."
        )


def _tell_made(split: str, dataset: Any) -> None:
    if PartialState().is_main_process:
        logger.warning(
            f"The {split} data are questions ({', '.join(_names(dataset))}); prompts were made of them with the "
            "standard system prompt. vgr_trl.data.rows.prepare_rows does so with options of your own."
        )


def checked_config(args: DAPOConfig | None, model: str | PreTrainedModel, options: Mapping[str, Any]) -> DAPOConfig:
    """Return the options of a trainer; raise `ConfigError` if they do not fit its other named arguments."""
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return DAPOConfig(f"{name.rstrip('/').split('/')[-1]}-DAPO")
    if not isinstance(args, DAPOConfig):
        raise ConfigError(f"args is a {type(args).__name__}: give a DAPOConfig, which takes the same options.")
    if args.max_prompt_length is not None and options.get("environment_factory") is not None:
        raise ConfigError(
            "max_prompt_length needs prompts from the data, but environment_factory makes them: drop one."
        )
    return args


def make_ready(trainer: ConstructedTrainer, peft_config: PeftConfig | None) -> None:
    """Check what TRL has constructed, and make prompts of its data.

    Raises:
        UnsupportedTRLError: TRL cannot score on its device.
        ConfigError: the adapter names modules that the model lacks, or the data have images that it cannot read.
        DataError: the data are not understood, or no row can be used.
    """
    close_group_at_exit()
    give_timeout(trainer.args.ddp_timeout)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    if peft_config is not None:
        refuse_targets_without_module(trainer.accelerator.unwrap_model(trainer.model))
    make_data_ready(trainer)
    refuse_images_without_vision(trainer)


def check_data(trainer: "DAPOTrainer", measured_columns: Iterable[str]) -> None:
    """Refuse rewards and data that cannot be trained with; leave out prompts over `max_prompt_length`."""
    check_rewards(trainer, measured_columns)
    limit: int | None = trainer.args.max_prompt_length
    if limit is not None:

        def count(split: str) -> None:
            trainer.step_metrics.prompts_too_long += split == "train"

        def kept(dataset: Any, split: str, part: str | None) -> Any:
            length = partial(prompt_length, trainer)
            return drop_long_prompts(dataset, length, limit, part or split, partial(count, split))

        change_data(trainer, kept)
    refuse_too_few_prompts(trainer)


def find_idle_options(trainer: ConstructedTrainer, measurement: Measurement, weights_change: bool) -> dict[str, str]:
    """Return why each option of the trainer that is not at its default has no effect, by name."""
    facts = {
        "attention": "attention" in measurement.needed,
        "similarity": "similarity" in measurement.needed,
        "blind_answers": "blind" in measurement.needed,
        "changing_weights": weights_change,
        "evaluation": trainer.eval_dataset is not None,
        "length_reward": any("overlong" in name for name in trainer.reward_func_names),
    }
    return unused_options(trainer.args, [name for name, holds in facts.items() if not holds])


def announce(
    trainer: ConstructedTrainer,
    features: Mapping[str, Feature],
    vision: VisionCache,
    idle_options: Mapping[str, str],
) -> None:
    """Let the main process say what passes leave out and compute once, and which options are risky or idle."""
    if not trainer.accelerator.is_main_process:
        return
    args = trainer.args
    logger.warning(describe_features(features))
    shared = features["share_generation"].enabled or features["share_training"].enabled
    if shared and has_active_dropout(trainer.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if trainer._is_vlm:
        logger.warning(str(vision))
    risk = coefficient_warning(args.perception_loss_weight, args.der_loss_weight1, args.der_loss_weight2)
    if risk is not None:
        logger.warning(risk)
    for name, why in idle_options.items():
        logger.warning(f"{name} is without effect because {why}.")


def plan_rewards(
    reward_funcs: Any, args: DAPOConfig, num_generations: Callable[[], int]
) -> tuple[list[Any], RewardSchedule]:
    """Return the rewards as TRL gets them, and the schedule of the weights of those that were given, some by name."""
    loaded = partial(
        load_reward, max_completion_length=args.max_completion_length, soft_punish_cache=args.soft_punish_cache
    )
    rewards = [loaded(each) if is_reward_name(each) else each for each in as_list(reward_funcs)]
    if args.vgr_hard_negative:
        rewards = hardened(rewards)
    if args.attention_reward_scale == "accuracy":
        rewards = scaled_by_accuracy(rewards)
    schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
    return over_whole_groups(rewards, num_generations) + [kl_penalty_reward] * args.penalises_kl, schedule


def over_whole_groups(rewards: Sequence[Any], num_generations: Callable[[], int]) -> list[Any]:
    """Return rewards of which those that compare the completions of a prompt see whole groups.

    Args:
        num_generations: completions per prompt, asked for at each call.
    """
    state = PartialState()
    return [
        gather_groups(reward, gather_object, state.process_index, state.num_processes, num_generations)
        if needed_columns(reward) is not None
        else reward
        for reward in rewards
    ]


def with_image_lists(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of which those with a null image have an empty list of images, which TRL knows; null fails there."""
    if any(name in rows[0] for name in IMAGE_COLUMNS) and not all(map(images_of, rows)):
        return [{**row, "images": images_of(row)} for row in rows]
    return rows


def as_list(reward_funcs: Any) -> list[Any]:
    """Return one or several reward functions as a list."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def refuse_images_without_vision(trainer: ConstructedTrainer) -> None:
    """Raise `ConfigError` if the data have images that the model cannot read."""
    for name, dataset in named_datasets(trainer):
        if not trainer._is_vlm and (columns := image_columns(dataset)):
            raise ConfigError(
                f"The {name} data has a column `{columns[0]}`, but {type(trainer.model).__name__} with "
                f"{type(trainer.processing_class).__name__} reads text only: use a vision-language model with its "
                "processor, or remove the column."
            )


def check_rewards(trainer: ConstructedTrainer, measured_columns: Iterable[str]) -> None:
    """Refuse rewards that cannot be called with the columns; environments add columns of their own later."""
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return
    for _, dataset in named_datasets(trainer):
        if (columns := getattr(dataset, "column_names", None)) is not None:
            for reward in trainer.reward_funcs:
                check_callable(reward, [*columns, *measured_columns])


def prompt_length(trainer: ConstructedTrainer, row: Mapping[str, Any]) -> int:
    """Tokens of the row's prompt as the policy will read it, image tokens included."""
    prompt, images = row["prompt"], images_of(row)
    if images:
        if isinstance(prompt, str):
            raise DataError("A row with images has a text as its prompt: give a conversation (a list of messages).")
        prompt = prepare_multimodal_messages(prompt, images=images)
    return len(trainer._tokenize_prompts([prompt])[0][0])


def refuse_too_few_prompts(trainer: ConstructedTrainer) -> None:
    """A rollout takes distinct prompts; TRL drops a smaller rest, which here would be everything."""
    args = trainer.args
    prompts = args.prompts_per_rollout
    rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else prompts
    if rows < prompts:
        raise DataError(
            f"The train data has {rows} rows, but a rollout takes {prompts} prompts (generation_batch_size "
            f"{args.generation_batch_size} / num_generations {args.num_generations}): add rows, or lower "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )
