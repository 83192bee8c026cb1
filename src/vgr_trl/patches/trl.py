"""Faults of TRL: each with its link, and what makes the repair removable."""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from packaging.version import Version
from torch import nn
from transformers import GenerationConfig, ProcessorMixin
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import images_of
from vgr_trl.errors import DataError, error_text, printable
from vgr_trl.patching import patched_attribute
from vgr_trl.pixels import image_inputs_of
from vgr_trl.releases import release
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.prefix_split import is_image_token
from vgr_trl.token_types import TOKEN_TYPES, causal_type

logger = logging.get_logger(__name__)

# Prompts and completions in the form that tables of completions can hold and show.


def conversation_text(messages: Any) -> str:
    """Return a conversation as one text, with `<image>` for an image, and characters that do not show as their numbers.

    A column of a table has one type, and trackers show texts. The messages of a prompt with images are lists of parts,
    one of which has no text: wandb 0.31 refuses them, trackio 0.43 shows `[object Object]`, and Parquet cannot hold
    them beside prompts without images, whose content is a text (seen with TRL 1.16).

    TRL prints the table too, and passes on what clears a terminal, renames its window or reorders a line.

    Args:
        messages: with a `role` and a `content` that is a text or a list of parts; a text is a text.

    Returns:
        The content of a single message; of several, each behind its role.
    """
    if isinstance(messages, str):
        return printable(messages)
    if len(messages) == 1:
        return printable(_content(messages[0]))
    return printable("\n\n".join(f"{message['role']}: {_content(message)}" for message in messages))


@contextmanager
def flatten_conversations(columns: dict[str, Any]) -> Iterator[None]:
    """In this block, prompts and completions are the texts of their conversations; afterwards what they were."""
    kept = {name: columns[name] for name in ("prompt", "completion")}
    columns.update({name: [conversation_text(messages) for messages in column] for name, column in kept.items()})
    try:
        yield
    finally:
        columns.update(kept)


@contextmanager
def keep_training_table(output_dir: str | None, step: int, evaluates: bool) -> Iterator[None]:
    """In this block TRL writes its table of completions; that of an evaluation then gets a name of its own, `…_eval`.

    TRL 1.16 names both by the step, so that an evaluation replaced the table of training of its step.

    Args:
        evaluates: whether it is one of an evaluation, which this process writes.
    """
    file = _folder(output_dir) / f"completions_{step:05d}.parquet"
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
def warn_of_lost_table(trainer: GRPOTrainer, mode: str) -> Iterator[None]:
    """Warn if TRL cannot write its table of completions in this block, or a tracker cannot take it.

    TRL 1.16 clears the metrics once they are logged, and then makes the table: errors before that are raised.
    """
    try:
        yield
    except Exception as error:
        if not trainer.log_completions or trainer._metrics[mode]:
            raise
        logger.warning_once(f"Completions cannot be logged ({error_text(error)}); training continues without them.")


def remove_oldest_tables(output_dir: str | None, max_bytes: float) -> None:
    """Remove the oldest tables of completions, except the first, until all have at most `max_bytes` together."""
    paths = _folder(output_dir).glob("completions_[0-9]*.parquet")
    sizes = {path: path.stat().st_size for path in sorted(paths, key=lambda path: (int(path.stem.split("_")[1]), path))}
    total = sum(sizes.values())
    for path in list(sizes)[1:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= sizes[path]


def _folder(output_dir: str | None) -> Path:
    return Path(output_dir or "trainer_output", "completions")


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text = "".join(str(part["text"]) if part.get("type") == "text" else f"<{part.get('type')}>" for part in parts)
    return text + (f" {message['tool_calls']}" if message.get("tool_calls") else "")


# The images of the table of completions, gathered by all processes or by none.
#
# TRL gathers them where the rows of a process have images, so rows with images on one process and without on another
# end in a hang or an abort (grpo_trainer of TRL 1.16, `log_multimodal`); and where only some batches have images,
# those of a table stand beside the wrong completions.


@contextmanager
def images_logged_by_all(trainer: GRPOTrainer, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Log the images of these rows in place of TRL, which is about to log the completions; all processes call this.

    Runs with tools keep TRL's way, which knows the images that tools return.
    """
    if not trainer.log_multimodal or trainer.tools or trainer.environment_factories:
        yield
        return
    with patched_attribute(trainer, "log_multimodal", False):
        yield
    gathered = gather_object([images_of(row) or _images_in_messages(row.get("prompt")) for row in rows])
    logged: Any = trainer._logs["images"]
    if any(gathered) or logged:
        without = len(trainer._logs["prompt"]) - len(gathered) - len(logged)
        logged.extend([[] for _ in range(without)])
        logged.extend(gathered)


def _images_in_messages(prompt: Any) -> list[Any]:
    messages = prompt if isinstance(prompt, list) else []
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]


# What TRL logs of a rollout batch, where further rounds of prompts belong to the same batch.


@contextmanager
def merge_round_metrics(trainer: GRPOTrainer, completions: int) -> Iterator[list[int]]:
    """Make one entry of what TRL logs for a rollout batch and for each further round that is generated in this block.

    Means are weighted by completions; of smallest and largest values the smallest and the largest is kept.

    Args:
        completions: of that batch, on this process.

    Yields:
        Completions of a process in that batch, and in each further round, for which the block adds an entry.
    """
    metrics, rounds = trainer._metrics["train"], [completions]
    before = {name: len(values) for name, values in metrics.items()}
    keep_newest(trainer._logs, completions * trainer.accelerator.num_processes)
    yield rounds
    for name, values in metrics.items():
        further = len(values) - before.get(name, 0)
        if further == len(rounds) - 1 > 0 and before.get(name):
            values[-len(rounds) :] = [_merge_rounds(name, values[-len(rounds) :], rounds)]


def _merge_rounds(name: str, values: Sequence[float], counts: Sequence[int]) -> float:
    known = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
    if not known:
        return math.nan
    if extreme := re.search(r"(?:^|[/_])(min|max)(?:[/_]|$)", name):
        return (min if extreme[1] == "min" else max)(value for value, _ in known)
    return sum(value * count for value, count in known) / sum(count for _, count in known)


def replace_newest(values: deque[Any], newest: list[Any]) -> None:
    """Put `newest` in the place of the last values of a column, as many."""
    for _ in newest:
        values.pop()
    values.extend(newest)


def enlarge_tables(logs: dict[str, Any], count: int) -> None:
    """Make room for `count` rows in the table of completions, in place; TRL's holds one rollout batch."""
    for name, values in logs.items():
        is_column = isinstance(values, deque)
        logs[name] = deque(values, count) if is_column else defaultdict(lambda: deque(maxlen=count), values)


def keep_newest(logs: dict[str, Any], count: int) -> None:
    """Drop all but the last `count` rows of the table of completions, in place: those of earlier rollouts."""
    for values in logs.values():
        for column in [values] if isinstance(values, deque) else values.values():
            while len(column) > count:
                column.popleft()


@contextmanager
def unlogged(trainer: GRPOTrainer) -> Iterator[None]:
    """Generate and reward in this block without a trace in metrics, tables and counts."""
    with (
        patched_attribute(trainer, "_metrics", {mode: defaultdict(list) for mode in trainer._metrics}),
        patched_attribute(trainer, "_pending_extra_logs", defaultdict(list)),
        patched_attribute(trainer, "_pending_metrics", defaultdict(list)),
        patched_attribute(trainer.state, "num_input_tokens_seen", trainer.state.num_input_tokens_seen),
    ):
        yield


# What TRL's constructor and generation read off the trainer, where ours has options beside.


def enable_reference_model(owner: Any, args: DAPOConfig) -> AbstractContextManager[None]:
    """Set beta to 1 in this block if a KL needs the reference, so that TRL builds and scores it."""
    return patched_attribute(owner, "beta", 1.0 if args.kl_coef > 0 else owner.beta)


@contextmanager
def override_sampling(trainer: GRPOTrainer, wanted: Mapping[str, float]) -> Iterator[None]:
    """Override `temperature` and `top_p` of vLLM or transformers in this block; a temperature of 0 is greedy."""

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
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patched_attribute(owner, name, value))
        yield


# Completions without image tokens: TRL before 1.16 lets the policy sample them.
#
# A sampled image token stands for an image that is not there, and the next pass fails (`Image features and image
# tokens do not match`). TRL 1.16 suppresses it; this does the same. Removable with TRL 1.15.


def suppress_image_tokens(trainer: GRPOTrainer, installed: str | None = None) -> None:
    """Let the constructed `trainer` generate no image tokens, where TRL does not see to it.

    Args:
        trainer: with transformers' generation; one with vLLM's is left alone, as by TRL.
    """
    model: Any = trainer.model
    token = getattr(model.config, "image_token_id", None)
    if release(installed) >= Version("1.16") or trainer.use_vllm or token is None:
        return
    if isinstance(trainer.processing_class, ProcessorMixin):
        options = {"suppress_tokens": [token], **trainer.generation_kwargs}
        trainer.generation_kwargs = options
        trainer.generation_config = GenerationConfig(**options, disable_compile=True)


# Compiled decoding. TRL's generation config says `disable_compile`, so that a static cache is no faster than another:
# 5.1 s instead of 1.7 s for 128 tokens of 8 completions of a 7B on an H200.


def let_decoding_compile(trainer: GRPOTrainer) -> None:
    """Let transformers compile the decoding step of the constructed `trainer` where the user chose a static cache.

    Sharded parameters are gathered and dropped around each generation, and a compiled step would hold on to them.
    """
    sharded = trainer.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    args: Any = trainer.args
    if args.cache_implementation == "static" and not trainer.use_vllm and not sharded:
        trainer.generation_config.disable_compile = None


# Pixels of Idefics and SmolVLM, which lie by rows, padded to the most images of a row.
#
# TRL 1.16 cuts them by images where a batch has as many images as rows, though rows differ (2, 1, 1, 0): rows then get
# pixels of their neighbours, and nothing fails. Removable with a TRL that tells the two apart.


def has_pixels_by_row(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a batch or a pass have one entry per row, as TRL too has it of their mask."""
    return inputs.get("pixel_attention_mask") is not None and inputs.get("spatial_shapes") is None


@contextmanager
def keep_pixel_rows_whole() -> Iterator[None]:
    """In this block TRL shuffles pixels that lie by rows with their rows."""
    name, plain = "split_pixel_values_by_grid", grpo_trainer.split_pixel_values_by_grid
    with patched_attribute(grpo_trainer, name, lambda batch: batch if has_pixels_by_row(batch) else plain(batch)):
        yield


@contextmanager
def shuffle_by(shuffle: Callable[[dict[str, Any]], dict[str, Any]], joins_pixels: bool) -> Iterator[None]:
    """In this block TRL shuffles rollouts by `shuffle`, and joins the pixels of all micro-batches, or of none.

    It generates in this block, too: pixels of a turn behind texts of tools are always joined.
    """
    plain = grpo_trainer.unsplit_pixel_values_by_grid

    def join(batch: dict[str, Any]) -> dict[str, Any]:
        return plain(batch) if joins_pixels or "completion_ids" not in batch else dict(batch)

    with (
        patched_attribute(grpo_trainer, "shuffle_sequence_dict", shuffle),
        patched_attribute(grpo_trainer, "unsplit_pixel_values_by_grid", join),
    ):
        yield


@keep_pixel_rows_whole()
def split_anew(batches: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows of some micro-batches as so many others; the run that saved them has joined more or fewer."""
    by_row: list[Any] = [grpo_trainer.split_pixel_values_by_grid(batch) for batch in batches]
    whole: dict[str, Any] = dict(by_row[0])
    for name, value in whole.items():
        if isinstance(value, list):
            whole[name] = [row for batch in by_row for row in batch[name]]
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            whole[name] = torch.cat([batch[name] for batch in by_row])
    parts: Any = grpo_trainer.split_tensor_dict(whole, count)
    return [grpo_trainer.unsplit_pixel_values_by_grid(part) for part in parts]


# Calls of tools that the policy writes. In TRL 1.16, nested brackets overrun the parser, and names are echoed.

_MOST_NESTED = 50  # lists and dicts in the arguments of a call; copies and reports of a rollout recurse into them
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}  # those within texts count too


def readable_calls(clean: Callable[[str], str]) -> AbstractContextManager[None]:
    """In this block, a call that cannot be read is text, and the name of a tool is cleaned.

    Args:
        clean: replaces special tokens and lone surrogates.
    """
    plain = grpo_trainer.parse_response

    def parse(tokenizer: Any, ids: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = plain(tokenizer, ids, *args, **kwargs)
            for call in parsed.get("tool_calls") or ():
                function = _checked_call(call["function"])
                call.update(type=call["type"], function=function | {"name": clean(function["name"])})
        except Exception:  # whatever a parser raises
            return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        return parsed

    return patched_attribute(grpo_trainer, "parse_response", parse)


def _checked_call(function: dict[str, Any]) -> Any:
    """Return a call without lone surrogates, or raise an error if its arguments are nested too deeply."""
    text = json.dumps(function, ensure_ascii=False).encode("utf-8", "replace").decode()
    if max(accumulate(_BRACKETS.get(character, 0) for character in text)) > _MOST_NESTED:
        raise DataError(f"The arguments of a call are nested deeper than {_MOST_NESTED}.")
    return json.loads(text)


# Images that tools return, beside Qwen-VL: made as the processor makes them, and marked as the model reads them.
#
# TRL 1.16 has the image processor make them without the options of the processor around it (InternVL writes the tokens
# of several tiles and gets one), hands on whatever else that returns (`num_crops` of Gemma 3, which generation
# refuses), and marks only tokens named <|image_pad|> or <|image|>, as `token_type_ids` also where a model takes none
# (LLaVA). See https://github.com/huggingface/trl/pull/6906; removable with a TRL that does the three otherwise.

_SCORING_ARGUMENTS = frozenset(signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)


@contextmanager
def process_with_options(processor: Any) -> Iterator[None]:
    """Apply the processor's image options in this block, where TRL calls the image processor alone."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    options = {**defaults.get("images_kwargs", {}), **(getattr(processor, "images_kwargs", None) or {})}
    with ExitStack() as stack:
        for name, value in options.items():
            stack.enter_context(patched_attribute(processor.image_processor, name, value))
        yield


def mark_images(model: nn.Module, ids: torch.Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of a pass with the token types (N, S) of their tokens, under each name that the model takes.

    Args:
        ids: tokens of whole rows, (N, S).
        given: by name; token types among them are replaced.
    """
    causal = causal_model(model)
    types, taken = is_image_token(ids, causal.config).long(), signature(type(causal).forward).parameters
    others = {name: value for name, value in given.items() if name not in TOKEN_TYPES}
    return others | {name: types for name in TOKEN_TYPES if name in taken}


def mark_turn(model: nn.Module, prompt_ids: Sequence[Sequence[int]], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with which a turn behind images of tools is generated, with token types for each row.

    Raises:
        DataError: pixels lie by rows, and TRL has the image processor make one row of all images.
    """
    if has_pixels_by_row(fields):
        shown = f"TRL would show all rows one row of images to {type(model).__name__}, which pads the images of a row"
        raise DataError(f"A tool has returned an image, and {shown}: use another model, or tools that return text.")
    marked = [mark_images(model, torch.tensor([ids]), {}) for ids in prompt_ids]
    return image_inputs_of(fields) | {name: [types[name][0].tolist() for types in marked] for name in marked[0]}


def mark_scored_images(model: nn.Module, ids: torch.Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of TRL's scoring as `mark_images` does, without those that it does not have."""
    return mark_images(model, ids, {name: value for name, value in given.items() if name in _SCORING_ARGUMENTS})


# Token types of completions, where prompts have some: they must not let a completion see what comes after it.


def make_completions_causal(inputs: Mapping[str, Any], config: Any, completion_length: int) -> dict[str, Any]:
    """Return inputs of a pass whose token types (N, P + T) are `causal_type` in the completions.

    TRL pads them with 0 there, which in PaliGemma lets completions see their own future.

    Args:
        inputs: by name; those without token types are returned as they are.
    """
    changed = dict(inputs)
    value = changed.get("token_type_ids")
    if value is not None and (kind := causal_type(config, "token_type_ids")):
        completions = value.new_full((len(value), completion_length), kind)
        changed["token_type_ids"] = torch.cat([value[:, :-completion_length], completions], dim=1)
    return changed
