"""What `DAPOTrainer` makes sure of before the first generation: rewards, columns, prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.rows.columns import image_columns, images_of
from vgr_trl.data.rows.lengths import drop_long_prompts
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards.signatures import check_callable


def refuse_targets_without_module(model: Any) -> None:
    """Raise `ConfigError` if an adapter names a target that is no module of the model, which PEFT passes over.

    Args:
        model: a `PeftModel` that was just made.
    """
    targets = next(iter(model.peft_config.values())).target_modules
    if isinstance(targets, str) or not targets:
        return
    adapted = getattr(model.base_model, "targeted_module_names", [])
    missing = sorted(target for target in targets if not any(_ends_with(name, target) for name in adapted))
    if missing:
        linear = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "in_features")}
        names = ", ".join(sorted(linear - {"base_layer", "default"}))
        raise ConfigError(
            f"No module of {type(model.get_base_model()).__name__} is named {' or '.join(missing)}, which the adapter "
            f"targets: give other names (linear modules are {names})."
        )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def as_list(reward_funcs: Any) -> list[Any]:
    """Return one or several reward functions as a list."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def named_datasets(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The train data and every part of the eval data, with a name for messages."""
    for name, dataset in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        yield from ((name, part) for part in parts if part is not None)


def data_has_images(trainer: Any) -> bool:
    """Whether the data have a column of images, or are a stream whose columns are not known."""
    return any(
        getattr(dataset, "column_names", None) is None or image_columns(dataset)
        for _, dataset in named_datasets(trainer)
    )


def refuse_images_without_vision(trainer: Any) -> None:
    """Raise `ConfigError` if the data have images that the model cannot read."""
    for name, dataset in named_datasets(trainer):
        if not trainer._is_vlm and (columns := image_columns(dataset)):
            raise ConfigError(
                f"The {name} data has a column `{columns[0]}`, but {type(trainer.model).__name__} with "
                f"{type(trainer.processing_class).__name__} reads text only: use a vision-language model with its "
                "processor, or remove the column."
            )


def check_rewards(trainer: Any, measured_columns: Iterable[str]) -> None:
    """Refuse rewards that cannot be called with the columns; environments add columns of their own later."""
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return
    for _, dataset in named_datasets(trainer):
        if (columns := getattr(dataset, "column_names", None)) is not None:
            for reward in trainer.reward_funcs:
                check_callable(reward, [*columns, *measured_columns])


def drop_prompts_over_limit(trainer: Any, limit: int, on_streamed: Callable[[], None]) -> None:
    """Leave rows out whose prompt has more than `limit` tokens; `on_streamed` is called for each in a stream."""

    def kept(dataset: Any, name: str, on_dropped: Callable[[], None]) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({key: kept(part, key, on_dropped) for key, part in dataset.items()})
        if dataset is None:
            return None
        return drop_long_prompts(dataset, lambda row: prompt_length(trainer, row), limit, name, on_dropped)

    trainer.train_dataset = kept(trainer.train_dataset, "train", on_streamed)
    trainer.eval_dataset = kept(trainer.eval_dataset, "eval", lambda: None)


def prompt_length(trainer: Any, row: Mapping[str, Any]) -> int:
    """Tokens of the row's prompt as the policy will read it, image tokens included."""
    prompt, images = row["prompt"], images_of(row)
    if images:
        if isinstance(prompt, str):
            raise DataError("A row with images has a text as its prompt: give a conversation (a list of messages).")
        prompt = prepare_multimodal_messages(prompt, images=images)
    return len(trainer._tokenize_prompts([prompt])[0][0])


def refuse_too_few_prompts(trainer: Any) -> None:
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
