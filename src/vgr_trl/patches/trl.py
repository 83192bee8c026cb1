"""Repairs of faults in TRL, each with its link and the condition under which it can be removed."""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from packaging.version import Version
from torch import nn
from transformers import GenerationConfig, ProcessorMixin
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.batch import Batch
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import images_of
from vgr_trl.errors import DataError, error_text, printable, release
from vgr_trl.patching import patched_attribute, patched_attributes
from vgr_trl.pixels import TOKEN_TYPES, image_inputs_of
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.prefix_split import image_token_ids, is_image_token

logger = logging.get_logger(__name__)

# Prompts and completions as texts, for tables of completions.


def conversation_text(messages: Any) -> str:
    """Return a conversation as a printable text, with `<image>` for each image.

    A column of a table has one type, and trackers show texts. Messages with images are lists of parts: wandb 0.31
    refuses them, trackio 0.43 shows `[object Object]`, and Parquet cannot store them beside messages that are texts
    (seen with TRL 1.16). TRL prints the table, too, with characters that clear a terminal or reorder a line.

    Args:
        messages: messages with a `role` and a `content`, a text or a list of parts; or a text.

    Returns:
        The content of a single message; several messages with their roles.
    """
    if isinstance(messages, str):
        return printable(messages)
    if len(messages) == 1:
        return printable(_content_text(messages[0]))
    return printable("\n\n".join(f"{message['role']}: {_content_text(message)}" for message in messages))


def flatten_conversations(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a table with prompts and completions as texts."""
    return {**columns, **{name: [*map(conversation_text, columns[name])] for name in ("prompt", "completion")}}


@contextmanager
def keep_training_table(output_dir: str, step: int, evaluates: bool) -> Iterator[None]:
    """Write an evaluation's table of completions to a separate file, `…_eval`, in this block.

    TRL 1.16 names both tables by the step, so that an evaluation would overwrite the table of training.

    Args:
        output_dir: output folder of the run.
        step: number of the step.
        evaluates: whether this process writes the table of an evaluation.
    """
    file = Path(output_dir, "completions", f"completions_{step:05d}.parquet")
    kept = file.with_suffix(".training")
    if evaluates and file.exists():
        file.replace(kept)
    try:
        yield
    finally:
        if evaluates and file.exists():
            file.replace(file.with_name(f"{file.stem}_eval.parquet"))
        if evaluates and kept.exists():
            kept.replace(file)


@contextmanager
def warn_of_lost_table(metrics: Mapping[str, Any], logs_table: bool) -> Iterator[None]:
    """Warn if TRL cannot write its table of completions in this block, or a tracker refuses it.

    TRL 1.16 clears the metrics once they are logged, then writes the table: earlier errors are raised.

    Args:
        metrics: unlogged metrics of the trainer.
        logs_table: whether the trainer writes the table.
    """
    try:
        yield
    except Exception as error:
        if not logs_table or metrics:
            raise
        logger.warning_once(f"Completions cannot be logged ({error_text(error)}); training continues without them.")


def remove_oldest_tables(output_dir: str, max_bytes: float) -> None:
    """Remove the oldest tables of completions, except the first, until all tables have at most `max_bytes`."""
    paths = Path(output_dir, "completions").glob("completions_[0-9]*.parquet")
    sizes = {path: path.stat().st_size for path in sorted(paths, key=lambda path: (int(path.stem.split("_")[1]), path))}
    total = sum(sizes.values())
    for path in list(sizes)[1:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= sizes[path]


def _content_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text = "".join(str(part["text"]) if part.get("type") == "text" else f"<{part.get('type')}>" for part in parts)
    return text + (f" {message['tool_calls']}" if message.get("tool_calls") else "")


# Images of the table of completions, gathered by all processes or none.
#
# TRL 1.16 (`log_multimodal`) gathers images in processes whose rows have images. If only some processes have images,
# it hangs or aborts. If only some batches have images, the table shows them beside the wrong completions.


@contextmanager
def images_logged_by_all(trainer: GRPOTrainer, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Log the images of rows instead of TRL, which logs their completions in this block; all processes call it.

    With tools TRL logs the images, as it knows those that tools return.

    Args:
        trainer: trainer that logs.
        rows: rows of this process.
    """
    if not trainer.log_multimodal or trainer.tools or trainer.environment_factories:
        yield
        return
    with patched_attribute(trainer, "log_multimodal", False):
        yield
    gathered = gather_object([images_of(row) or _find_images_in_messages(row.get("prompt")) for row in rows])
    logged: Any = trainer._logs["images"]
    if any(gathered) or logged:
        logged.extend([[] for _ in range(len(trainer._logs["prompt"]) - len(gathered) - len(logged))])
        logged.extend(gathered)


def _find_images_in_messages(prompt: Any) -> list[Any]:
    messages = prompt if isinstance(prompt, list) else []
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]


# TRL's metrics of a rollout batch with further rounds of prompts.


@contextmanager
def merge_round_metrics(
    metrics: dict[str, list[float]], table: dict[str, Any], completions: int, processes: int
) -> Iterator[list[int]]:
    """Merge TRL's metrics of a rollout batch and of further rounds, generated in this block.

    Means are weighted by completions; minima and maxima are kept.

    Args:
        metrics: unlogged metrics of training, one value per rollout.
        table: columns of the table of completions.
        completions: number of completions of the batch in this process.
        processes: number of processes.

    Yields:
        Number of completions of the batch and of each further round; the block appends the numbers of its rounds.
    """
    rounds = [completions]
    before = {name: len(values) for name, values in metrics.items()}
    keep_newest(table, completions * processes)
    yield rounds
    for name, values in metrics.items():
        if len(values) - before.get(name, 0) == len(rounds) - 1 > 0 and before.get(name):
            values[-len(rounds) :] = [_merge_rounds(name, values[-len(rounds) :], rounds)]


def _merge_rounds(name: str, values: Sequence[float], counts: Sequence[int]) -> float:
    defined = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
    if not defined:
        return math.nan
    if extreme := re.search(r"(?:^|[/_])(min|max)(?:[/_]|$)", name):
        return (min if extreme[1] == "min" else max)(value for value, _ in defined)
    return sum(value * count for value, count in defined) / sum(count for _, count in defined)


def replace_newest(values: deque[Any], newest: list[Any]) -> None:
    """Replace the last values of a column by as many new values."""
    for _ in newest:
        values.pop()
    values.extend(newest)


def enlarge_tables(logs: dict[str, Any], count: int) -> None:
    """Make room for `count` rows in the table of completions, in place; TRL's table holds a single rollout batch."""
    for name, values in logs.items():
        is_column = isinstance(values, deque)
        logs[name] = deque(values, count) if is_column else defaultdict(lambda: deque(maxlen=count), values)


def keep_newest(logs: dict[str, Any], count: int) -> None:
    """Drop rows of earlier rollouts from the table of completions, in place, and keep the last `count` rows."""
    for values in logs.values():
        for column in [values] if isinstance(values, deque) else values.values():
            while len(column) > count:
                column.popleft()


@contextmanager
def unlogged(trainer: GRPOTrainer) -> Iterator[None]:
    """Generate and reward in this block without a trace in metrics, tables and counts."""
    metrics = {mode: defaultdict[str, list[float]](list) for mode in trainer._metrics}
    pending = {name: defaultdict[str, list[Any]](list) for name in ("_pending_extra_logs", "_pending_metrics")}
    seen = patched_attribute(trainer.state, "num_input_tokens_seen", trainer.state.num_input_tokens_seen)
    with patched_attributes(trainer, _metrics=metrics, **pending), seen:
        yield


# Attributes that TRL's constructor and generation read, overridden by options of this library.


def enable_reference_model(owner: Any, args: DAPOConfig, *, teaches: bool = False) -> AbstractContextManager[None]:
    """Set beta to 1 in this block if the reference model is needed, so that TRL builds and scores it.

    Args:
        owner: object with the attribute `beta`.
        args: options of the run.
        teaches: whether a teacher needs it too, or a KL term alone.
    """
    needed = args.kl_coef > 0 or (teaches and args.teacher_view is not None and args.teacher_weights == "reference")
    return patched_attribute(owner, "beta", 1.0 if needed else owner.beta)


def override_sampling(trainer: GRPOTrainer, wanted: Mapping[str, float]) -> AbstractContextManager[None]:
    """Override `temperature` and `top_p` of vLLM or transformers in this block; temperature 0 is greedy.

    Args:
        trainer: trainer that generates.
        wanted: `temperature`, `top_p`, both or neither.
    """

    def change(options: dict[str, Any]) -> dict[str, Any]:
        if wanted.get("temperature") != 0:
            return {**options, **wanted}
        sampling = ("temperature", "top_p", "top_k", "min_p")
        return {name: value for name, value in options.items() if name not in sampling} | {"do_sample": False}

    owner: Any = trainer.vllm_generation if trainer.use_vllm else trainer
    changes: Mapping[str, Any] = wanted
    if wanted and not trainer.use_vllm:
        config = GenerationConfig(**change(trainer.generation_config.to_diff_dict()))
        changes = {"generation_config": config, "generation_kwargs": change(trainer.generation_kwargs)}
    return patched_attributes(owner, **changes)


# Completions without image tokens: TRL before 1.16 lets the policy sample them.
#
# A sampled image token has no image, and the next pass fails (`Image features and image tokens do not match`). TRL 1.16
# suppresses image tokens in the same way. Removable with TRL 1.15.


def suppress_image_tokens(trainer: GRPOTrainer, installed: str | None = None) -> None:
    """Suppress image tokens in a trainer's generation, where TRL does not.

    Args:
        trainer: constructed trainer; generation by vLLM is unchanged, as in TRL.
        installed: version of TRL; None: the installed version.
    """
    model: Any = trainer.model
    tokens = image_token_ids(model.config)
    reads_images = isinstance(trainer.processing_class, ProcessorMixin) and tokens
    if release(installed) < Version("1.16") and reads_images and not trainer.use_vllm:
        options = {"suppress_tokens": [*tokens], **trainer.generation_kwargs}
        trainer.generation_kwargs = options
        trainer.generation_config = GenerationConfig(**options, disable_compile=True)


# Compiled decoding. TRL sets `disable_compile`, which makes a static cache slow: 5.1 s instead of 1.7 s for 128 tokens
# of 8 completions of a 7B on an H200.


def let_decoding_compile(args: DAPOConfig, config: GenerationConfig, accelerator: Accelerator) -> None:
    """Let transformers compile the decoding step of a generation config with a static cache.

    Sharded parameters are gathered and freed around each generation; a compiled step would keep them.
    """
    sharded = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if args.cache_implementation == "static" and not sharded:
        config.disable_compile = None


# Continuous batching, which TRL 1.16 refuses for every model with a processor, as transformers' takes token ids only
# (https://github.com/huggingface/transformers/issues/43386).


@contextmanager
def let_models_with_processors_batch(trainer: GRPOTrainer, args: DAPOConfig) -> Iterator[None]:
    """Construct a trainer in this block without TRL's check of continuous batching; switch it on afterwards."""
    with patched_attribute(args, "use_transformers_continuous_batching", False):
        yield
    if args.use_transformers_continuous_batching:
        from transformers.generation import ContinuousBatchingConfig  # older releases lack it

        options: Any = args.transformers_continuous_batching_config
        config = ContinuousBatchingConfig(**{"max_memory_percent": 0.5, **(options or {})})  # TRL's default
        trainer.use_transformers_continuous_batching, trainer.continuous_batching_config = True, config


# Pixels of Idefics and SmolVLM, which have one entry per row, padded to the most images of a row.
#
# TRL 1.16 cuts them by images where a batch has as many images as rows, even if rows differ (2, 1, 1, 0): rows then get
# pixels of their neighbours without an error. Removable with a TRL that distinguishes the two layouts.


def has_pixels_by_row(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a batch or a pass have an entry for each row."""
    return inputs.get("pixel_attention_mask") is not None and inputs.get("spatial_shapes") is None


@contextmanager
def keep_pixel_rows_whole() -> Iterator[None]:
    """Let TRL shuffle pixels that have an entry for each row with their rows, in this block."""
    name, plain = "split_pixel_values_by_grid", grpo_trainer.split_pixel_values_by_grid
    with patched_attribute(grpo_trainer, name, lambda batch: batch if has_pixels_by_row(batch) else plain(batch)):
        yield


def shuffle_by(shuffle: Callable[[dict[str, Any]], dict[str, Any]], joins_pixels: bool) -> AbstractContextManager[None]:
    """Replace TRL's shuffle of rollouts in this block, and choose whether it joins the pixels of rows again.

    TRL also generates in this block: pixels of a turn behind results of tools are always joined.

    Args:
        shuffle: returns a rollout with its rows in another order.
        joins_pixels: whether TRL joins the pixels of micro-batches.
    """
    plain = grpo_trainer.unsplit_pixel_values_by_grid

    def join(batch: dict[str, Any]) -> dict[str, Any]:
        return plain(batch) if joins_pixels or "completion_ids" not in batch else dict(batch)

    return patched_attributes(grpo_trainer, shuffle_sequence_dict=shuffle, unsplit_pixel_values_by_grid=join)


# Tool calls of the policy. In TRL 1.16 nested brackets exhaust the parser's stack, and names are echoed.

_MOST_NESTED = 50  # depth of lists and dicts in a call's arguments, into which copies and reports of a rollout recurse
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}  # brackets within texts count, too


def readable_calls(clean: Callable[[str], str]) -> AbstractContextManager[None]:
    """Treat tool calls that cannot be parsed as text, and clean the names of tools, in this block.

    Args:
        clean: replaces special tokens and lone surrogates.
    """
    plain = grpo_trainer.parse_response

    def parse(tokenizer: Any, ids: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = plain(tokenizer, ids, *args, **kwargs)
            for call in parsed.get("tool_calls") or ():
                function = _check_call(call["function"])
                call.update(type=call["type"], function=function | {"name": clean(function["name"])})
        except Exception:  # parsers raise errors of any type
            return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        return parsed

    return patched_attribute(grpo_trainer, "parse_response", parse)


def _check_call(function: dict[str, Any]) -> Any:
    """Return a tool call without lone surrogates, or raise an error if its arguments are nested too deeply."""
    text = json.dumps(function, ensure_ascii=False).encode("utf-8", "replace").decode()
    if max(accumulate(_BRACKETS.get(character, 0) for character in text)) > _MOST_NESTED:
        raise DataError(f"The arguments of a call are nested deeper than {_MOST_NESTED}.")
    return json.loads(text)


# Images that tools return to models other than Qwen-VL.
#
# TRL 1.16 calls the image processor without the options of its processor (InternVL writes tokens of several tiles and
# gets one tile), passes all its outputs on (`num_crops` of Gemma 3, which generation refuses), and marks only tokens
# named <|image_pad|> or <|image|>, by `token_type_ids` even where a model has none (LLaVA). See
# https://github.com/huggingface/trl/pull/6906; removable with a TRL that mends all three.


def process_with_options(processor: Any) -> AbstractContextManager[None]:
    """Apply the processor's image options in this block, where TRL calls the image processor alone."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    options = {**defaults.get("images_kwargs", {}), **(getattr(processor, "images_kwargs", None) or {})}
    return patched_attributes(processor.image_processor, **options)


def find_types(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Derive token types from tokens (N, S), under each name that a model accepts."""
    causal = causal_model(model)
    types, taken = is_image_token(ids, causal.config).long(), signature(type(causal).forward).parameters
    return {name: types for name in TOKEN_TYPES if name in taken}


def mark_images(model: nn.Module, batch: Batch) -> Batch:
    """Add token types that mark image tokens to a batch, under each name that the model accepts."""
    return batch.with_columns(**dict.fromkeys(TOKEN_TYPES) | find_types(model, batch.ids))


def mark_turn(model: nn.Module, prompt_ids: Sequence[Sequence[int]], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return multimodal fields for a turn behind images of tools, with token types of each row.

    Args:
        model: transformers model, also wrapped.
        prompt_ids: tokens of each row.
        fields: outputs of the image processor.

    Raises:
        DataError: the model pads the images of a row, and TRL would put all images into one row.
    """
    if has_pixels_by_row(fields):
        shown = f"TRL would show all rows one row of images to {type(model).__name__}, which pads the images of a row"
        raise DataError(f"A tool has returned an image, and {shown}: use another model, or tools that return text.")
    marked = [find_types(model, torch.tensor([ids])) for ids in prompt_ids]
    return image_inputs_of(fields) | {name: [types[name][0].tolist() for types in marked] for name in marked[0]}


# Copies of a model that a trainer was made with.
#
# TRL 1.16 puts its head into `model.forward`, around the forward pass of this very object. A deep copy trains its own
# weights, but generates with those of the model that it was copied from. Removable with a TRL that looks it up.


def forget_fused_head(model: Any) -> None:
    """Give a model its own forward pass back, before TRL wraps it; accelerate may have wrapped TRL's."""
    attributes = vars(causal_model(model))
    forward = attributes.get("_original_forward", attributes.get("forward"))
    if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
        attributes.pop("forward")
        attributes.pop("_original_forward", None)


# Prompts that are not padded.
#
# The processors of Gemma 4 pad prompts of several lengths unless they are told not to. TRL 1.16 takes their tokens for
# the prompts, without the mask, so that padding is read and trained on as text. Removable with a TRL that tells them.

PADDING = {"Gemma4Processor", "Gemma4UnifiedProcessor"}


def keep_prompts_unpadded(trainer: GRPOTrainer) -> None:
    """Tell a processor that pads by default not to pad prompts."""
    if PADDING.intersection(kind.__name__ for kind in type(trainer.processing_class).__mro__):
        options: Any = trainer.chat_template_kwargs
        trainer.chat_template_kwargs = {"padding": False, **options}
