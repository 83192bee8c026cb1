"""What `DAPOTrainer` makes sure of before the first generation: rewards, columns, prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftConfig
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.compat.cpu_timeout import give_timeout
from vgr_trl.compat.gloo_exit import close_group_at_exit
from vgr_trl.compat.sampled_images import suppress_image_tokens
from vgr_trl.config import DAPOConfig
from vgr_trl.config.effects import Circumstances, options_without_effect
from vgr_trl.credit.collapse import coefficient_warning
from vgr_trl.data.rows.columns import IMAGE_COLUMNS, image_columns, images_of
from vgr_trl.data.rows.lengths import drop_long_prompts
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards.accuracy_scale import scaled_by_accuracy
from vgr_trl.rewards.registry import hardened, is_reward_name, load_reward
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.rewards.signatures import check_callable
from vgr_trl.rewards.whole_groups import gather_groups, needed_columns
from vgr_trl.sharing import SharingPlan
from vgr_trl.signals import Measurement
from vgr_trl.skipping import SkippingPlan, VisionCache
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.kl import kl_penalty_reward
from vgr_trl.training.start.ready_data import change_data, make_data_ready
from vgr_trl.training.start.refusals import refuse_targets_without_module
from vgr_trl.training.start.seams import check_attributes, check_head

logger = logging.get_logger(__name__)


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


def model_name(model: PreTrainedModel) -> str:
    """Return the name under which a model was loaded, else that of its class."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def make_ready(trainer: ConstructedTrainer, peft_config: PeftConfig | None) -> None:
    """Check what TRL has constructed, and make prompts of its data.

    Raises:
        UnsupportedTRLError: it lacks what is relied on, or cannot score on its device.
        ConfigError: the adapter names modules that the model lacks, or the data have images that it cannot read.
        DataError: the data are not understood, or no row can be used.
    """
    close_group_at_exit()
    give_timeout(trainer.args.ddp_timeout)
    check_attributes(trainer)
    check_head(trainer.accelerator.device)
    suppress_image_tokens(trainer)
    if peft_config is not None:
        refuse_targets_without_module(trainer.accelerator.unwrap_model(trainer.model))
    make_data_ready(trainer)
    refuse_images_without_vision(trainer)


def check_data(trainer: ConstructedTrainer, measured_columns: Iterable[str], on_streamed: Callable[[], None]) -> None:
    """Refuse rewards and data that cannot be trained with; leave out prompts over `max_prompt_length`.

    Args:
        on_streamed: called for each prompt of a stream that is left out.
    """
    check_rewards(trainer, measured_columns)
    limit: int | None = trainer.args.max_prompt_length
    if limit is not None:
        drop_prompts_over_limit(trainer, limit, on_streamed)
    refuse_too_few_prompts(trainer)


def find_idle_options(trainer: ConstructedTrainer, measurement: Measurement, weights_change: bool) -> dict[str, str]:
    """Return why each option of the trainer that is not at its default has no effect, by name."""
    evaluates, names = trainer.eval_dataset is not None, trainer.reward_func_names
    measures = bool(measurement.wanted.attention), bool(measurement.wanted.similarity), measurement.blind
    return options_without_effect(trainer.args, Circumstances(*measures, weights_change, evaluates, names))


def announce(
    trainer: ConstructedTrainer,
    sharing: SharingPlan,
    vision: VisionCache,
    skipping: SkippingPlan,
    idle_options: Mapping[str, str],
) -> None:
    """Let the main process say what passes leave out and compute once, and which options are risky or idle."""
    if not trainer.accelerator.is_main_process:
        return
    args = trainer.args
    logger.warning(str(sharing))
    if trainer._is_vlm:
        logger.warning(str(vision))
    logger.warning(str(skipping))
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


def named_datasets(trainer: ConstructedTrainer) -> Iterator[tuple[str, Any]]:
    """The train data and every part of the eval data, with a name for messages."""
    for name, dataset in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        yield from ((name, part) for part in parts if part is not None)


def data_has_images(trainer: ConstructedTrainer) -> bool:
    """Whether the data have a column of images, or are a stream whose columns are not known."""
    return any(
        getattr(dataset, "column_names", None) is None or image_columns(dataset)
        for _, dataset in named_datasets(trainer)
    )


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


def drop_prompts_over_limit(trainer: ConstructedTrainer, limit: int, on_streamed: Callable[[], None]) -> None:
    """Leave rows out whose prompt has more than `limit` tokens; `on_streamed` is called for each in a stream."""

    def kept(dataset: Any, split: str, part: str | None) -> Any:
        dropped = on_streamed if split == "train" else lambda: None
        return drop_long_prompts(dataset, lambda row: prompt_length(trainer, row), limit, part or split, dropped)

    change_data(trainer, kept)


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
