"""The trainer that the flags of `vgr-trl train` describe: its rewards, its rows and its model, loaded and checked."""

import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from trl import ModelConfig, get_peft_config, get_quantization_config

from vgr_trl.cli.flags.arguments import DataArguments, DefaultRewards, RewardArguments
from vgr_trl.cli.loading import load_processor, load_rows, refuse_missing_folder, tested
from vgr_trl.cli.run.evaluated import rows_to_evaluate
from vgr_trl.config import DAPOConfig
from vgr_trl.config.effects import changed_options
from vgr_trl.data.rows.columns import image_columns, images_of, undecoded
from vgr_trl.data.rows.skipped import append_skipped, report_skipped
from vgr_trl.errors import ConfigError
from vgr_trl.rewards import load_rewards
from vgr_trl.rewards.signatures import reads_solution
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.start.ready_data import reads_boxes

FIRST_ROWS = 16  # of a stream, which say whether it has images


def build_trainer(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig, eval_follows: bool
) -> DAPOTrainer:
    """Return the trainer of a run, its data loaded; say on the main process which rows and options are left out.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used.
    """
    if data.dataset_streaming and config.max_steps <= 0:
        raise ConfigError("dataset_streaming is on, so the number of steps is not known: give max_steps.")
    reward_funcs = _reward_functions(rewards, config)
    skipped_file = Path(config.output_dir or "trainer_output") / "skipped.jsonl"
    on_skipped = partial(append_skipped, path=skipped_file) if config.process_index == 0 else lambda row: None
    processor = cache(
        partial(load_processor, str(model.model_name_or_path), model.model_revision, config.trust_remote_code)
    )
    load = partial(
        load_rows,
        needs_solution=any(map(reads_solution, reward_funcs)),
        on_skipped=on_skipped,
        processor=processor,
        boxes=reads_boxes(config, reward_funcs),
    )
    order = config.seed if config.shuffle_dataset else None
    train_rows, skipped = load(data, data.dataset_train_split, limit=data.max_train_rows, shuffle_seed=order)
    if data.dataset_streaming:
        config.shuffle_dataset = False  # TRL's buffer would hold a thousand rows with decoded images
    load_test = partial(load, tested(data), data.dataset_test_split, limit=data.max_test_rows)
    evaluated = rows_to_evaluate(data, config, train_rows, load_test, eval_follows)
    skipped += evaluated.skipped
    reward_funcs, left_out = _without_vgr(rewards, config, reward_funcs, evaluated.train)
    if config.process_index == 0:
        for said in filter(None, (evaluated.said, left_out, _idle_adapter(model))):
            print(said, file=sys.stderr)
        report_skipped(skipped, skipped_file)
    loading = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    if isinstance(config.model_init_kwargs, str):
        raise ConfigError(f"model_init_kwargs is {config.model_init_kwargs!r}: give a JSON object.")
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return DAPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=evaluated.train,
        eval_dataset=evaluated.test,
        processing_class=processor(),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def _reward_functions(rewards: RewardArguments, config: DAPOConfig) -> list[Any]:
    """The reward functions of a run, and before them the reward model, if there is one."""
    if isinstance(rewards.reward_funcs, DefaultRewards):
        rewards.reward_funcs = DefaultRewards.of_run(config.reward_weights or config.early_reward_weights)
    functions: list[Any] = load_rewards(
        rewards.reward_funcs,
        max_completion_length=config.max_completion_length,
        soft_punish_cache=config.soft_punish_cache,
        files=rewards.file_options(),
        options=rewards.plugin_options,
    )
    if rewards.reward_model_name_or_path:
        refuse_missing_folder(rewards.reward_model_name_or_path)
        functions.insert(0, rewards.reward_model_name_or_path)
    return functions


def _without_vgr(
    rewards: RewardArguments, config: DAPOConfig, functions: list[Any], rows: Any
) -> tuple[list[Any], str | None]:
    """Return the reward functions, the default ones without `vgr` where no row has an image, and a sentence on that."""
    names = rewards.reward_funcs
    wanted = config.vgr_hard_negative or config.attention_reward_scale != "none"
    if not isinstance(names, DefaultRewards) or wanted or _has_images(rows):
        return functions, None
    offset = len(functions) - len(names)
    place = names.index("vgr") + offset
    for option in ("reward_weights", "early_reward_weights"):
        weights = getattr(config, option)
        if weights is not None and len(weights) == len(functions):
            setattr(config, option, [weight for number, weight in enumerate(weights) if number != place])
    kept = [function for number, function in enumerate(functions) if number != place]
    return kept, "The data have no images: the reward vgr, which needs them, is left out, and its weight with it."


def _idle_adapter(model: ModelConfig) -> str | None:
    """Which options of an adapter are given without one."""
    of_adapters = ("lora_", "use_rslora", "use_dora")
    idle = [name for name in changed_options(model) if name.startswith(of_adapters)]
    if model.use_peft or not idle:
        return None
    names = f"{' and '.join(idle)} {'is' if len(idle) == 1 else 'are'}"
    return f"{names} without effect because use_peft is False, so all weights train: add --use_peft."


def _has_images(rows: Any) -> bool:
    if isinstance(rows, IterableDataset):
        return any(map(images_of, rows.take(FIRST_ROWS)))
    return bool(image_columns(rows)) and any(map(images_of, undecoded(rows.with_format(None))))


def source_of(data: DataArguments) -> str:
    """Return what names the data: a name on the hub, a folder or files."""
    return str(data.dataset_name or data.dataset_path or data.data_files)


def separate_lora_modules(model: ModelConfig) -> None:
    """Take commas between names, and spaces, as separators; a text with other signs is a pattern of PEFT's.

    TRL turns a list of one module into a text, which PEFT reads as a pattern for the whole name.
    """
    modules = model.lora_target_modules
    if isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules.replace(",", "").replace(" ", "")):
        modules = [modules]
    if isinstance(modules, list):
        names = [name for text in modules for name in re.split(r"[,\s]+", text.strip()) if name]
        model.lora_target_modules = names
